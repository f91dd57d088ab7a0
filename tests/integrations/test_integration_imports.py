"""Imports of the integrations, and errors for missing libraries."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["syncheck.integrations", "syncheck.integrations.accelerate"])
def test_imports_no_library(module: str) -> None:
    """The package and Accelerate's helper import no library."""
    libraries = ("torch", "lightning", "pytorch_lightning", "transformers", "accelerate")
    done = python(f"import sys, {module}; print([name for name in {libraries!r} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("name", "missing"), [("lightning", ("lightning", "pytorch_lightning")), ("transformers", ("transformers",))]
)
def test_a_missing_library(name: str, missing: tuple[str, ...]) -> None:
    """Without its library, a module raises an ImportError with the install command."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\nimport syncheck.integrations.{name}"
    done = python(code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: syncheck.integrations.{name} needs ")
    assert last.endswith(f"which is not installed: pip install {name}")


@pytest.mark.parametrize(
    ("name", "module"), [("lightning", "lightning/pytorch"), ("transformers", "transformers/trainer_callback")]
)
def test_a_library_that_cannot_be_imported(name: str, module: str, tmp_path: Path) -> None:
    """If an installed library lacks a dependency, its error is shown."""
    (tmp_path / module).mkdir(parents=True)
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / module / "__init__.py").write_text("import gone")
    done = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import syncheck.integrations.{name}")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'gone'"


@pytest.mark.parametrize(
    "loaded", [("lightning.pytorch",), ("pytorch_lightning",), ("lightning.pytorch", "pytorch_lightning")]
)
def test_the_callback_inherits_from_loaded_packages(loaded: tuple[str, ...]) -> None:
    """Lightning has two packages with a Callback class; the callback inherits from each loaded class.

    Invalid options raise when the callback is created, before the training.
    """
    code = (
        "import sys, types\n"
        f"for name in {loaded!r}:\n"
        "    package = sys.modules[name] = types.ModuleType(name)\n"
        "    package.Callback = type('Callback', (), {'__module__': name})\n"
        "from syncheck.errors import UsageError\n"
        "from syncheck.integrations.lightning import SyncCheckCallback\n"
        "SyncCheckCallback(every=5)\n"
        "try: SyncCheckCallback(on_desync='ignore')\n"
        "except UsageError as error: assert str(error).startswith(\"on_desync='ignore': must be\"), error\n"
        "else: raise AssertionError\n"
        f"assert all(issubclass(SyncCheckCallback, sys.modules[name].Callback) for name in {loaded!r})\n"
    )
    assert python(code).stderr == ""
