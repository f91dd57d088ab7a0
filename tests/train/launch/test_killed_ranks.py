"""Killed ranks: the survivors name the rank and exit, no process remains, and the run resumes from its checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support.programs import LONG, RUN, TRAIN, children, environment, errors, find_ranks, wait_until_trains
from support.scenarios import load
from support.started import alive, wait_for

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from support.programs import Programs, Run

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
LOST_RANK = r"error: rank {} lost rank {} \(.*\)"


def start_by_hand(programs: Programs, ranks: int, *arguments: Any) -> list[subprocess.Popen[str]]:
    """Start each rank with its own command line."""
    return [programs.start(*TRAIN, "--rank", rank, "--world-size", ranks, *arguments) for rank in range(ranks)]


def wait_for_exit(programs: Programs, processes: list[subprocess.Popen[str]]) -> list[Run]:
    """Wait at most 25 s until each process exits, and check that no child process remains."""
    runs = programs.finish_all(processes, timeout=25)
    assert not any(alive(process) for process in processes)
    return runs


@pytest.mark.parametrize(("store", "victim", "ranks"), [("tcp", 1, 3), ("tcp", 0, 3), ("file", 2, 4)])
def test_killed_rank_of_a_run_by_hand(
    programs: Programs, tmp_path: Path, free_port: int, store: str, victim: int, ranks: int
) -> None:
    """Each survivor names the killed rank in one line, even if the killed rank served the store or was no neighbor."""
    address = ("--ip", "127.0.0.1", "--port", free_port)
    rendezvous = address if store == "tcp" else ("--init-method", f"file://{tmp_path}/meeting")
    processes = start_by_hand(programs, ranks, *rendezvous, *LONG)
    wait_until_trains(processes[0])
    processes[victim].kill()
    runs = wait_for_exit(programs, processes)
    for rank in set(range(ranks)) - {victim}:
        (line,) = errors([runs[rank]])
        assert re.fullmatch(LOST_RANK.format(rank, victim), line), line
        assert runs[rank].returncode == 1


def test_killed_rank_under_torchrun(programs: Programs) -> None:
    """Under torchrun each survivor names the killed rank in one line."""
    programs.forks = False  # the rank is found by its first variables
    process = programs.start(*TORCHRUN, 3, RUN, *LONG)
    wait_until_trains(process)
    (victim,) = [pid for pid in children(process.pid) if "\0RANK=2\0" in environment(pid)]
    os.kill(victim, signal.SIGKILL)
    (run,) = wait_for_exit(programs, [process])
    assert run.returncode == 1
    lines = [line.removeprefix("run.py: ") for line in run.stderr.splitlines() if line.startswith("run.py: ")]
    assert len(lines) == 2
    for rank, line in enumerate(sorted(lines)):
        assert re.fullmatch(LOST_RANK.format(rank, 2), line), line


def test_killed_while_saving(programs: Programs, tmp_path: Path) -> None:
    """After SIGKILL in a run that saves at every step, all files load and the run resumes."""
    saves = ("--checkpoint-every", 1, "--save-every", 1, "--max-steps", 60, "--width", 4, "--progress", "none")
    options = ("--init-method", f"file://{tmp_path}/meeting", "--out", "parts", "--timeout", 30)
    ranks = start_by_hand(programs, 2, *options, *saves)
    history = tmp_path / "parts" / "history" / "ddp"
    wait_for((history / "step_10" / "rank_1.pth").exists, timeout=60)
    ranks[1].kill()
    wait_for_exit(programs, ranks)
    files = list(history.glob("step_*/rank_*.pth"))
    assert len(files) >= 19
    for file in files:
        assert load(file)["step"] == int(file.parent.name.removeprefix("step_"))
    resumed = programs.run(*TRAIN, "--spawn", 2, *saves, "--out", "parts", "--resume")
    assert resumed.returncode == 0
    assert re.search(r"^run.py: resumed ddp at step \d+/60, ", resumed.stderr, re.MULTILINE)
    assert not list((tmp_path / "parts").rglob("*.tmp"))


def test_stopped_and_continued(programs: Programs, tmp_path: Path) -> None:
    """After --timeout the other ranks name the stopped rank; once continued, the stopped rank exits with an error."""
    ranks = start_by_hand(programs, 3, "--init-method", f"file://{tmp_path}/meeting", *LONG, "--timeout", 3)
    wait_until_trains(ranks[0])
    os.kill(ranks[1].pid, signal.SIGSTOP)
    runs = [programs.finish(ranks[rank], timeout=25) for rank in (0, 2)]
    for rank, run in zip((0, 2), runs, strict=True):
        (line,) = errors([run])
        assert re.fullmatch(LOST_RANK.format(rank, 1), line), line
    os.kill(ranks[1].pid, signal.SIGCONT)
    (run,) = wait_for_exit(programs, ranks[1:2])
    assert run.returncode == 1
    (line,) = errors([run])
    assert line.startswith("error: rank 1 lost ")


def test_killed_before_the_rendezvous(programs: Programs) -> None:
    """If a rank is killed before the rendezvous, the run ends with one line that names the rank and the signal."""
    programs.forks = False  # forked ranks start at once
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(find_ranks(process.pid)) == 2)
    os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
    (run,) = wait_for_exit(programs, [process])
    assert (run.returncode, errors([run])) == (1, ["error: rank 1 was ended by signal 9 (SIGKILL)"])
