"""One rank is killed: the others name it and end, no process is left, and the run goes on from what was saved."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from programs import LONG, RUN, TRAIN, children, environment, errors, find_ranks, wait_until_trains
from scenarios import load
from started import alive, wait_for

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from programs import Programs, Run

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ENDED = r"error: rank {} lost rank {} \(.*\)"


def by_hand(programs: Programs, ranks: int, *arguments: Any) -> list[subprocess.Popen[str]]:
    """Start each rank as from a shell of its own."""
    return [programs.start(*TRAIN, "--rank", rank, "--world-size", ranks, *arguments) for rank in range(ranks)]


def gone(programs: Programs, processes: list[subprocess.Popen[str]]) -> list[Run]:
    """Wait for the ends, well within 30 s; nothing is left."""
    runs = [programs.finish(process, timeout=25) for process in processes]
    assert not any(alive(process) for process in processes)
    return runs


@pytest.mark.parametrize(("where", "victim", "ranks"), [("tcp", 1, 3), ("tcp", 0, 3), ("file", 2, 4)])
def test_by_hand(programs: Programs, tmp_path: Path, free_port: int, where: str, victim: int, ranks: int) -> None:
    """Each survivor names the killed rank in one line, even if that rank served the store or was no neighbor."""
    address = ("--ip", "127.0.0.1", "--port", free_port)
    place = address if where == "tcp" else ("--init-method", f"file://{tmp_path}/meeting")
    processes = by_hand(programs, ranks, *place, *LONG)
    wait_until_trains(processes[0])
    processes[victim].kill()
    runs = gone(programs, processes)
    for rank in set(range(ranks)) - {victim}:
        (line,) = errors([runs[rank]])
        assert re.fullmatch(ENDED.format(rank, victim), line), line
        assert runs[rank].returncode == 1


def test_torchrun(programs: Programs) -> None:
    """Under torchrun each survivor's line comes before its report."""
    process = programs.start(*TORCHRUN, 3, RUN, *LONG)
    wait_until_trains(process)
    (victim,) = [pid for pid in children(process.pid) if "\0RANK=2\0" in environment(pid)]
    os.kill(victim, signal.SIGKILL)
    (run,) = gone(programs, [process])
    assert run.returncode == 1
    lines = [line.removeprefix("run.py: ") for line in run.stderr.splitlines() if line.startswith("run.py: ")]
    assert len(lines) == 2
    for rank, line in enumerate(sorted(lines)):
        assert re.fullmatch(ENDED.format(rank, 2), line), line


def test_killed_while_it_saves(programs: Programs, tmp_path: Path) -> None:
    """After -9 in a run that saves at every step all files load, and it can be resumed."""
    saves = ("--checkpoint-every", 1, "--save-every", 1, "--max-steps", 60, "--width", 4, "--progress", "none")
    where = ("--init-method", f"file://{tmp_path}/meeting", "--out", "parts", "--timeout", 30)
    ranks = by_hand(programs, 2, *where, *saves)
    history = tmp_path / "parts" / "history" / "ddp"
    wait_for(lambda: (history / "step_10" / "rank_1.pth").exists(), timeout=60)
    ranks[1].kill()
    gone(programs, ranks)
    files = list(history.glob("step_*/rank_*.pth"))
    assert len(files) >= 19
    for file in files:
        assert load(file)["step"] == int(file.parent.name.removeprefix("step_"))
    resumed = programs.run(*TRAIN, "--spawn", 2, *saves, "--out", "parts", "--resume")
    assert resumed.returncode == 0
    assert re.search(r"^run.py: resumed ddp at step \d+/60, ", resumed.stderr, re.MULTILINE)
    assert not list((tmp_path / "parts").rglob("*.tmp"))


def test_stopped_and_continued(programs: Programs, tmp_path: Path) -> None:
    """A rank that is stopped is named after --timeout; continued, it ends too."""
    ranks = by_hand(programs, 3, "--init-method", f"file://{tmp_path}/meeting", *LONG, "--timeout", 3)
    wait_until_trains(ranks[0])
    os.kill(ranks[1].pid, signal.SIGSTOP)
    runs = [programs.finish(ranks[rank], timeout=25) for rank in (0, 2)]
    for rank, run in zip((0, 2), runs, strict=True):
        (line,) = errors([run])
        assert re.fullmatch(ENDED.format(rank, 1), line), line
    os.kill(ranks[1].pid, signal.SIGCONT)
    (run,) = gone(programs, ranks[1:2])
    assert run.returncode == 1
    (line,) = errors([run])
    assert line.startswith("error: rank 1 lost ")


def test_killed_while_it_starts(programs: Programs) -> None:
    """A rank that is killed before the ranks have met ends the run in one line, which names it."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(find_ranks(process.pid)) == 2)
    os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
    (run,) = gone(programs, [process])
    assert (run.returncode, errors([run])) == (1, ["error: rank 1 was ended by signal 9 (SIGKILL)"])
