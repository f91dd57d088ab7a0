"""`syncheck --version` prints the details for a bug report."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.states import omit

import syncheck
from syncheck import cli, versions

if TYPE_CHECKING:
    import pytest


def test_version_prints_the_details_for_a_bug_report() -> None:
    """The first line has the version of syncheck, for scripts; Python, machine, libraries and location follow."""
    done = subprocess.run([sys.executable, "-m", "syncheck", "--version"], capture_output=True, text=True, check=True)
    own_values, python, libraries, location = done.stdout.splitlines()
    assert own_values == f"syncheck {metadata.version('syncheck')}"
    assert python == f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    numbers = dict(item.split(" ") for item in libraries.split(", "))
    assert list(numbers) == list(versions.LIBRARIES)
    for name, number in numbers.items():
        # Without torch, in the environment of the command line only.
        assert number == (metadata.version(name) if find_spec(name.replace("-", "_")) else "-")
    assert location == f"in {Path(syncheck.__file__).parent}"


def test_missing_libraries_are_listed(monkeypatch: Any, capsys: Any) -> None:
    """A missing library is shown as a dash, and no library is imported to read its version."""
    find_versions = versions.find_versions

    def find_without_torch(names: Any) -> dict[str, str]:
        return omit(find_versions(names), "torch")

    monkeypatch.setattr(versions, "find_versions", find_without_torch)
    code = "import sys; from syncheck.cli import main; main(['--version'])\n"
    code += "print({'numpy', 'torch', 'rich', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert cli.main(["--version"]) == 0
    assert ", torch -," in capsys.readouterr().out


def test_versions_are_names_of_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first folder on sys.path counts, names are normalized, and a source tree has its version in a file."""
    for folder in (
        "one/rich_argparse-1.7.0.dist-info",
        "two/Rich_Argparse-2.0.dist-info",
        "two/numpy-2.1-py3.11.egg-info",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "two" / "syncheck.egg-info").mkdir()
    (tmp_path / "two" / "syncheck.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nVersion: 9.9\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / name) for name in ("missing", "one", "two")])
    result = versions.find_versions(("rich-argparse", "numpy", "syncheck", "torch"))
    assert result == {"rich-argparse": "1.7.0", "numpy": "2.1", "syncheck": "9.9"}
