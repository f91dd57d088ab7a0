"""pytest sessions in a child process, several per process, because starting a process takes half a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_CHILD = """
import contextlib, io, json, os, pytest, sys

ended = []
for folder, arguments in json.loads(sys.stdin.read()):
    os.chdir(folder)
    path, out = list(sys.path), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = int(pytest.main(arguments))
    sys.path[:] = path
    for name in [name for name, module in sys.modules.items() if name in ("conftest", "test_suite")]:
        del sys.modules[name]
    ended.append((code, out.getvalue()))
json.dump(ended, sys.__stdout__)
"""


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
        found = {parts[0]: parts[1] for parts in split if len(parts) > 1 and parts[1] in words}
        # With -n the outcome stands first: [gw0] [ 50%] PASSED id
        for line in self.lines:
            if line.startswith("[gw") and "::" in line:
                found[line.split()[-1]] = next(word for word in line.split() if word in words)
        return found


def sessions(*runs: tuple[Path, list[Any]], columns: int = 200, **environment: str) -> list[Session]:
    """Run pytest in each folder with its arguments, one session after the other in one child process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    kept |= {"COLUMNS": str(columns), "PY_COLORS": "0", "CI": ""} | environment
    jobs = [(str(folder), [f"--rootdir={folder}", *map(str, arguments)]) for folder, arguments in runs]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD], input=json.dumps(jobs), capture_output=True, text=True, env=kept, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Session(code, out) for code, out in json.loads(done.stdout)]


def session(folder: Path, *arguments: Any, columns: int = 200, **environment: str) -> Session:
    """Run pytest once in a folder."""
    return sessions((folder, list(arguments)), columns=columns, **environment)[0]
