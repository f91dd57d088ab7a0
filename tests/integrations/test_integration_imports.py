"""What is imported with the integrations, and what is said where a library is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run lines of Python in a process of their own."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("module", ["syncheck.integrations", "syncheck.integrations.accelerate"])
def test_no_library_is_imported_that_is_not_needed(module: str) -> None:
    """The package imports no library, and Accelerate's helper none either: what it needs comes with its arguments."""
    libraries = ("torch", "lightning", "pytorch_lightning", "transformers", "accelerate")
    done = python(f"import sys, {module}; print([name for name in {libraries!r} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("name", "missing"), [("lightning", ("lightning", "pytorch_lightning")), ("transformers", ("transformers",))]
)
def test_a_missing_library_is_named_in_one_line(name: str, missing: tuple[str, ...]) -> None:
    """Without its library a module is an ImportError that says what to install."""
    code = f"import sys\nsys.modules.update(dict.fromkeys({missing!r}))\nimport syncheck.integrations.{name}"
    done = python(code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: syncheck.integrations.{name} needs ")
    assert last.endswith(f"which is not installed: pip install {name}")


@pytest.mark.parametrize(
    ("name", "module"), [("lightning", "lightning/pytorch"), ("transformers", "transformers/trainer_callback")]
)
def test_a_library_that_cannot_be_imported_says_why(name: str, module: str, tmp_path: Path) -> None:
    """Where the library is there, and something that it needs is not, that error is shown and not hidden."""
    (tmp_path / module).mkdir(parents=True)
    (tmp_path / name / "__init__.py").touch()
    (tmp_path / module / "__init__.py").write_text("import gone")
    done = python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import syncheck.integrations.{name}")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'gone'"


@pytest.mark.parametrize(
    "loaded", [("lightning.pytorch",), ("pytorch_lightning",), ("lightning.pytorch", "pytorch_lightning")]
)
def test_the_callback_is_one_of_the_packages_that_are_loaded(loaded: tuple[str, ...]) -> None:
    """Lightning has two packages with a class Callback each; the callback is one of each that the program uses."""
    code = (
        "import sys, types\n"
        f"for name in {loaded!r}:\n"
        "    package = sys.modules[name] = types.ModuleType(name)\n"
        "    package.Callback = type('Callback', (), {'__module__': name})\n"
        "from syncheck.integrations.lightning import SyncCheckCallback\n"
        "SyncCheckCallback(every=5)\n"
        f"assert all(issubclass(SyncCheckCallback, sys.modules[name].Callback) for name in {loaded!r})\n"
    )
    assert python(code).stderr == ""


def test_wrong_options_are_refused_before_the_training() -> None:
    """A callback cannot be made with options that no monitor takes."""
    code = (
        "import sys, types\n"
        "package = sys.modules['lightning.pytorch'] = types.ModuleType('lightning.pytorch')\n"
        "package.Callback = type('Callback', (), {})\n"
        "from syncheck.integrations.lightning import SyncCheckCallback\n"
        "SyncCheckCallback(on_desync='ignore')\n"
    )
    assert "UsageError: on_desync='ignore': must be raise, warn, resync" in python(code).stderr
