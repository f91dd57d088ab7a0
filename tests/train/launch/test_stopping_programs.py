"""Signals to runs as users start them: all ranks stop after the same step, saved, in one line, and leave nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from programs import LONG, RUN, TRAIN, errors, wait_until_trains
from started import ROOT, alive

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from programs import Programs

STATES = (*LONG, "--timeout", 60, "--checkpoint-every", 1_000_000)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, RUN)
SAVED = r"run\.py: stopped by {} after step (\d+); its state is saved; add --resume to continue"
# Signals alone, without a training: what it holds back, it prints.
HOLDS = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from train.launch.signals import Signals
signals = Signals(grace=2.0)
signals.listen()
signals.defer()
print("ready", flush=True)
said = 0
while True:
    if signals.number != said:
        said = signals.number
        print(said, flush=True)
    time.sleep(0.01)
"""


def start_long(programs: Programs, *command: Any, **environment: str) -> subprocess.Popen[str]:
    """Start a run that keeps states, and wait until it trains."""
    process = programs.start(*command, *STATES, **environment)
    wait_until_trains(process)
    return process


def holds(programs: Programs, *prefix: Any) -> subprocess.Popen[str]:
    """Start the program that only listens."""
    process = programs.start(*prefix, sys.executable, "-c", HOLDS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def stopped_at(folder: Path, stderr: str, name: str) -> int:
    """Find the one line, and check that the states of that step are there, and no half of one; returns the step."""
    (step,) = [int(found[1]) for line in stderr.splitlines() if (found := re.fullmatch(SAVED.format(name), line))]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [f"step_{step}/rank_{rank}.pth" for rank in range(len(files))]
    assert files
    return step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "number", "group", "code"),
    [
        ((*TRAIN, "--spawn", 2), signal.SIGTERM, False, 143),
        ((*TRAIN, "--spawn", 2), signal.SIGUSR1, False, 138),
        ((*TRAIN, "--method", "single"), signal.SIGINT, True, 130),
        ((*TRAIN, "--method", "single", "--workers", 1), signal.SIGTERM, True, 143),
        (TORCHRUN, signal.SIGTERM, False, 1),
        (TORCHRUN, signal.SIGINT, True, 1),
    ],
    ids=["spawn", "notice", "single", "workers", "torchrun", "ctrl-c"],
)
def test_stops_and_goes_on(
    programs: Programs, tmp_path: Path, launcher: tuple[Any, ...], number: int, group: bool, code: int
) -> None:
    """A signal to whoever started the ranks, or Ctrl-C to all, saves a state from which --resume goes on."""
    process = start_long(programs, *launcher)
    (os.killpg if group else os.kill)(process.pid, number)
    run = programs.finish(process, timeout=30)
    assert not alive(process)
    assert run.returncode == code
    method = "single" if "single" in launcher else "ddp"
    step = stopped_at(tmp_path / "ckpts" / ".resume" / method, run.stderr, signal.Signals(number).name)
    if launcher == (*TRAIN, "--spawn", 2) and number == signal.SIGTERM:
        run = programs.run(*launcher, *STATES, "--resume", "--max-steps", step + 3)
        assert run.returncode == 0
        assert f"run.py: resumed ddp at step {step}/{step + 3}, " in run.stderr


@pytest.mark.slow
def test_a_process_that_does_not_come_to_a_step(programs: Programs) -> None:
    """SIGTERM is noted, and ends the process with the reason when its grace is over."""
    process = holds(programs)
    process.terminate()
    run = programs.finish(process, timeout=20)
    assert (run.returncode, run.stdout) == (143, "15\n")
    (line,) = errors([run])
    assert re.match(r"ended by SIGTERM: .*\b2 s\b", line)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(programs: Programs) -> None:
    """The same signal twice within a second is one; a later one does not wait for the grace."""
    process = holds(programs)
    for pause in (0.2, 1.0, 0.0):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    run = programs.finish(process, timeout=20)
    assert (run.returncode, run.stdout, run.stderr) == (130, "2\n", "run.py: interrupted\n")


@pytest.mark.slow
def test_a_notice_may_take_its_time(programs: Programs) -> None:
    """SIGUSR1 only asks: the process goes on until it stops, or is told to end, and then has its grace."""
    process = holds(programs)
    process.send_signal(signal.SIGUSR1)
    time.sleep(3.0)
    assert process.poll() is None
    process.terminate()
    run = programs.finish(process, timeout=20)
    assert (run.returncode, run.stdout) == (138, f"{int(signal.SIGUSR1)}\n")


@pytest.mark.slow
def test_nohup(programs: Programs) -> None:
    """Signals that whoever started the process has told it to ignore stay ignored."""
    process = holds(programs, "env", "--ignore-signal=INT")
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{int(signal.SIGUSR1)}\n"
    process.kill()
