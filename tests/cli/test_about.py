"""`syncheck --version` prints the details for a bug report."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import syncheck
from syncheck import cli


def test_version_prints_the_details_for_a_bug_report() -> None:
    """The first line has the version of syncheck, for scripts; Python, machine, libraries and location follow."""
    done = subprocess.run([sys.executable, "-m", "syncheck", "--version"], capture_output=True, text=True, check=True)
    own, python, libraries, location = done.stdout.splitlines()
    assert own == f"syncheck {metadata.version('syncheck')}"
    assert python == f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    versions = dict(item.split(" ") for item in libraries.split(", "))
    assert versions["numpy"] == metadata.version("numpy")
    assert location == f"in {Path(syncheck.__file__).parent}"


def test_missing_libraries_are_listed(monkeypatch: Any, capsys: Any) -> None:
    """A missing library is shown as a dash, and no library is imported to read its version."""
    read_version = metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return read_version(name)

    monkeypatch.setattr(metadata, "version", without_torch)
    code = "import sys; from syncheck.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    code += "print({'numpy', 'torch', 'rich', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert ", torch -," in capsys.readouterr().out
