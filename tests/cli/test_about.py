"""`syncheck --version` prints what a bug report needs."""

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


def test_version_says_what_a_bug_report_needs() -> None:
    """Its own version stands first, for scripts; then Python, machine, libraries, and which copy of syncheck it is."""
    done = subprocess.run([sys.executable, "-m", "syncheck", "--version"], capture_output=True, text=True, check=True)
    own, python, libraries, place = done.stdout.splitlines()
    assert own == f"syncheck {metadata.version('syncheck')}"
    assert python == f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    named = dict(item.split(" ") for item in libraries.split(", "))
    assert named["numpy"] == metadata.version("numpy")
    assert place == f"in {Path(syncheck.__file__).parent}"


def test_what_is_not_installed_is_said(monkeypatch: Any, capsys: Any) -> None:
    """A library that is not there is a dash, and none is imported to find out."""
    known = metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", without_torch)
    code = "import sys; from syncheck.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass\n"
    code += "print({'numpy', 'torch', 'rich', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert ", torch -," in capsys.readouterr().out
