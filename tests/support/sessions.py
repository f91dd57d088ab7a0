"""pytest sessions in this process, because a process with pytest and its plugins takes a second to start."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from support.listings import find_texts

if TYPE_CHECKING:
    from pathlib import Path


# Without the import of hypothesis, and without the garbage collections at the end of a session.
FAST = ("-p", "no:hypothesispytest", "-p", "no:unraisableexception")


@dataclass
class Session:
    """Exit code and output of a session."""

    code: int
    out: str

    def __post_init__(self) -> None:
        self.lines = self.out.splitlines()

    def outcomes(self) -> dict[str, str]:
        """Return the outcome of each item by id. The session must have run with -v."""
        words = ("PASSED", "FAILED", "SKIPPED", "ERROR")
        split = [line.split(" ", 2) for line in self.lines if "::" in line.split(" ")[0]]
        outcomes = {parts[0]: parts[1] for parts in split if len(parts) > 1 and parts[1] in words}
        # With -n, the outcome comes before the id: [gw0] [ 50%] PASSED id
        for line in self.lines:
            if line.startswith("[gw") and "::" in line:
                outcomes[line.split()[-1]] = next(word for word in line.split() if word in words)
        return outcomes


def find_failure(output: str, title: str) -> str:
    """Return the part of an output about the failed test with this title, a regular expression."""
    match = re.search(rf"^_+ {title} _+\n(.*?)\n(?=_{{5,}} |={{5,}})", output, re.DOTALL | re.MULTILINE)
    assert match, output
    return match[1]


def sessions(*runs: tuple[Path, list[Any]], columns: int = 200) -> list[Session]:
    """Run pytest in each folder with its arguments, one session after the other."""
    return [session(folder, *arguments, columns=columns) for folder, arguments in runs]


def session(folder: Path, *arguments: Any, columns: int = 200) -> Session:
    """Run pytest once in a folder. Modules imported by the session are forgotten."""
    path, modules, out = list(sys.path), dict(sys.modules), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(out):
        for name in find_texts(os.environ, start=("PYTEST_", "COV_")):
            patch.delenv(name)
        for name, value in {"COLUMNS": str(columns), "PY_COLORS": "0", "CI": ""}.items():
            patch.setenv(name, value)
        patch.chdir(folder)
        try:
            code = int(pytest.main([f"--rootdir={folder}", *FAST, *map(str, arguments)]))
        finally:
            sys.path[:] = path
            for name in ("conftest", "test_suite", "interrupting"):
                sys.modules.pop(name, None)
            sys.modules.update(modules)
    return Session(code, out.getvalue())
