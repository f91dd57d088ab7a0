"""Programs that tests fork have the surroundings, the output and the end of programs that Python starts."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.started import CLONE, Processes, alive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not Processes.forks, reason="programs are not forked here")

# What a program sees, and what the process sees that it spawns.
SURROUNDINGS = """
import json, multiprocessing, os, random, signal, sys, tempfile, threading
import numpy, torch

def describe():
    folders = [folder for folder in sys.path if os.path.isdir(folder)]
    return {
        "arguments": sys.argv, "name": __name__, "file": __file__, "path": folders, "folder": os.getcwd(),
        "temporary": tempfile.gettempdir(), "variable": os.environ.get("GIVEN"),
        "drawn": [torch.initial_seed(), float(torch.rand(1)), random.random(), numpy.random.random()],
        "threads": [thread.name for thread in threading.enumerate()], "session": os.getsid(0) == os.getpid(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "process": multiprocessing.current_process().name, "input": sys.stdin and sys.stdin.read(),
        "main": sys.modules["__main__"].__dict__.get("marked"),
    }

def report(rank):
    with open(f"rank{rank}.json", "w") as file:
        json.dump(describe(), file)

marked = 1
if __name__ == "__main__":
    report("-of-parent")
    torch.multiprocessing.spawn(report, nprocs=1)
    print(random.random() != random.random())
    sys.exit(3)
"""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Yield a starter of programs in an empty folder."""
    started = Processes(tmp_path)
    try:
        yield started
    finally:
        started.kill()


def run(processes: Processes, *command: Any, forks: bool) -> tuple[int, str, str]:
    """Run a program of Python; return its exit code and output."""
    processes.forks = forks
    process = processes.start(sys.executable, *command, PYTHONPATH=CLONE, GIVEN="a b")
    # A fork has the command line of the server.
    assert ("fork_server" in read_command(process.pid)) == forks
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def read_command(pid: int) -> str:
    """Return the command line of a process."""
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


@pytest.mark.slow
def test_a_program_has_the_surroundings_of_any_other(processes: Processes, tmp_path: Path) -> None:
    """What a program and its ranks see is equal, and no two of them draw the same random numbers."""
    (tmp_path / "shown.py").write_text(SURROUNDINGS)
    seen, drawn = [], []
    for forks in (True, False):
        assert run(processes, "shown.py", "--option", forks=forks) == (3, "True\n", "")
        ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in ("-of-parent", 0)]
        seen.append(ranks)
        drawn += [number for rank in ranks for number in rank.pop("drawn")]
    for forked, other in zip(*seen, strict=True):
        assert [(name, forked[name], other[name]) for name in other if forked[name] != other[name]] == []
    assert len(set(drawn)) == len(drawn) == 16


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def fail():\n    raise ValueError('x')\n\nfail()\n", 1),
        ("import sys; sys.exit('a last word')", 1),
        ("import atexit; atexit.register(print, 'at the end'); print('x', end='')", 0),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("1 +", 1),
    ],
)
def test_a_program_ends_as_any_other(processes: Processes, tmp_path: Path, text: str, code: int) -> None:
    """Exit code, output and traceback are equal."""
    (tmp_path / "ended.py").write_text(text)
    forked = run(processes, "ended.py", forks=True)
    assert forked[0] == code
    assert forked == run(processes, "ended.py", forks=False)


def test_a_killed_program_leaves_no_process(processes: Processes, tmp_path: Path) -> None:
    """Neither the program nor its own server remains."""
    (tmp_path / "waiting.py").write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = processes.start(sys.executable, "waiting.py", PYTHONPATH=CLONE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    assert not alive(process)


@pytest.mark.parametrize("variable", ["PYTHONWARNINGS", "OMP_NUM_THREADS", "TORCH_LOGS"])
def test_other_settings_are_no_fork(processes: Processes, tmp_path: Path, variable: str) -> None:
    """A program whose variables matter when Python or torch starts is started by Python."""
    (tmp_path / "plain.py").write_text(f"import os; print(os.environ[{variable!r}])")
    values = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "2", "TORCH_LOGS": "+dynamo"}
    environment: dict[str, Any] = {variable: values[variable]}
    process = processes.start(sys.executable, "plain.py", PYTHONPATH=CLONE, **environment)
    assert "fork_server" not in read_command(process.pid)
    assert process.communicate(timeout=60)[0] == f"{values[variable]}\n"
