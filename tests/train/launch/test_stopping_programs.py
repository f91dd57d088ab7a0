"""Signals to real programs: all ranks save, stop after the same step and print one line."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.programs import LONG, RUN, TRAIN, errors, wait_until_trains
from support.started import ROOT, alive

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from support.programs import Programs

STATES = (*LONG, "--timeout", 60, "--checkpoint-every", 1_000_000)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, RUN)
SAVED = r"run\.py: stopped by {} after step (\d+); its state is saved; add --resume to continue"
# Listens for signals without training, and prints the number of the deferred signal.
LISTENER = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from train.launch.signals import Signals
signals = Signals(grace=2.0)
signals.listen()
signals.defer()
print("ready", flush=True)
printed = 0
while True:
    if signals.number != printed:
        printed = signals.number
        print(printed, flush=True)
    time.sleep(0.01)
"""


def start_long(programs: Programs, *command: Any, **environment: str) -> subprocess.Popen[str]:
    """Start a run with --checkpoint-every, and wait until it trains."""
    process = programs.start(*command, *STATES, **environment)
    wait_until_trains(process)
    return process


def start_listener(programs: Programs, *prefix: Any) -> subprocess.Popen[str]:
    """Start the program LISTENER, and wait until it listens."""
    process = programs.start(*prefix, sys.executable, "-c", LISTENER)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def stopped_at(folder: Path, stderr: str, name: str) -> int:
    """Return the step in the only message, and check that the folder has only complete states of this step."""
    (step,) = [int(match[1]) for line in stderr.splitlines() if (match := re.fullmatch(SAVED.format(name), line))]
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
def test_stops_and_resumes(
    programs: Programs, tmp_path: Path, launcher: tuple[Any, ...], number: int, group: bool, code: int
) -> None:
    """A signal to the launcher, or Ctrl-C to all processes, saves a state, and --resume continues from it."""
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
def test_a_process_without_steps_ends_after_its_grace(programs: Programs) -> None:
    """If a process reaches no step after SIGTERM, it ends with one line when the grace period is over."""
    process = start_listener(programs)
    process.terminate()
    run = programs.finish(process, timeout=20)
    assert (run.returncode, run.stdout) == (143, "15\n")
    (line,) = errors([run])
    assert re.match(r"ended by SIGTERM: .*\b2 s\b", line)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(programs: Programs) -> None:
    """A signal repeated within a second counts once; a later signal ends the process without a grace period."""
    process = start_listener(programs)
    for pause in (0.2, 1.0, 0.0):
        process.send_signal(signal.SIGINT)
        time.sleep(pause)
    run = programs.finish(process, timeout=20)
    assert (run.returncode, run.stdout, run.stderr) == (130, "2\n", "run.py: interrupted\n")


@pytest.mark.slow
def test_sigusr1_sets_no_deadline(programs: Programs) -> None:
    """SIGUSR1 starts no grace period; a later SIGTERM ends the process, with the exit code of SIGUSR1."""
    process = start_listener(programs)
    process.send_signal(signal.SIGUSR1)
    time.sleep(3.0)
    assert process.poll() is None
    process.terminate()
    run = programs.finish(process, timeout=20)
    assert (run.returncode, run.stdout) == (138, f"{int(signal.SIGUSR1)}\n")


@pytest.mark.slow
def test_ignored_signals_stay_ignored(programs: Programs) -> None:
    """If a process inherits a signal as ignored, as under nohup, it keeps ignoring the signal."""
    process = start_listener(programs, "env", "--ignore-signal=INT")
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGUSR1)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{int(signal.SIGUSR1)}\n"
    process.kill()
