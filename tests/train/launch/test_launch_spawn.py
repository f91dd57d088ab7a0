"""--spawn: start all ranks in one command, and report one exit status."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.programs import (
    LONG,
    SHORT,
    TRAIN,
    assert_trained,
    children,
    command,
    find_ranks,
    imports_torch,
    wait_until_trains,
)
from support.started import alive, wait_for

from train.launch.signals import ExitStatus
from train.launch.spawn import choose_status, wait_for_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from support.programs import Programs, Run

STOPPED = "run.py: stopped by {} after step \\d+; nothing was saved; .*--checkpoint-every N.*\n"
USER_ERROR, SHARED_ERROR = ExitStatus(2, "only here"), ExitStatus(2, "everywhere", shared=True)
LOST_PEER, DONE = ExitStatus(1, "lost another rank"), ExitStatus()


def start_long(programs: Programs, *arguments: Any) -> subprocess.Popen[str]:
    """Start a run on two ranks, and wait until it trains."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG, *arguments)
    wait_until_trains(process)
    assert len(find_ranks(process.pid)) == 2
    return process


def wait_for_clean_end(programs: Programs, process: subprocess.Popen[str]) -> Run:
    """Wait for the end of a run, and check that no process and no temporary file remains."""
    run = programs.finish(process)
    assert not alive(process)
    assert [path for path in programs.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    return run


@pytest.mark.slow
def test_trains(programs: Programs, tmp_path: Path) -> None:
    """Without a launcher, two processes train ddp, and leave no process and no temporary file."""
    run = wait_for_clean_end(programs, programs.start(*TRAIN, "--spawn", 2, *SHORT))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[1] == "saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth"
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_an_error_of_all_ranks_is_one_line(programs: Programs) -> None:
    """An error on all ranks is reported in one line, with exit code 2."""
    run = wait_for_clean_end(programs, programs.start(*TRAIN, "--spawn", 2, "--save-per-rank", "--out", "/dev/null/x"))
    message = "run.py: error: cannot write to --out /dev/null/x: Not a directory\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", message)


@pytest.mark.slow
def test_a_killed_rank_is_reported(programs: Programs) -> None:
    """If a rank is killed, the only line names this rank and its signal, and the exit code is 1."""
    process = start_long(programs)
    os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
    run = wait_for_clean_end(programs, process)
    assert (run.returncode, run.stderr) == (1, "run.py: error: rank 1 was ended by signal 9 (SIGKILL)\n")


@pytest.mark.slow
def test_a_suspended_rank_is_reported(programs: Programs) -> None:
    """After --timeout, one line names a suspended rank, and all processes end, including this rank."""
    process = start_long(programs, "--timeout", 2)
    os.kill(find_ranks(process.pid)[1], signal.SIGSTOP)
    run = wait_for_clean_end(programs, process)
    assert run.returncode == 1
    assert re.match(r"run.py: error: rank 0 lost rank 1 \(", run.stderr)
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_ends_all(programs: Programs) -> None:
    """Ctrl-C, which a terminal sends to all processes, stops all ranks after a step, with one line."""
    process = start_long(programs)
    os.killpg(process.pid, signal.SIGINT)
    run = wait_for_clean_end(programs, process)
    assert run.returncode == 130
    assert re.fullmatch(STOPPED.format("SIGINT"), run.stderr)


@pytest.mark.slow
def test_ctrl_c_to_one_rank_ends_all(programs: Programs, free_port: int) -> None:
    """SIGINT to a single rank stops all ranks after a step, with one line; the ranks meet at --ip and --port."""
    process = start_long(programs, "--ip", "127.0.0.1", "--port", free_port)
    with socket.create_connection(("127.0.0.1", free_port), 5):  # rank 0 serves the store
        pass
    os.kill(find_ranks(process.pid)[1], signal.SIGINT)
    run = wait_for_clean_end(programs, process)
    assert run.returncode == 130
    assert re.fullmatch(STOPPED.format("SIGINT"), run.stderr)


@pytest.mark.slow
def test_a_closed_terminal_ends_all(programs: Programs) -> None:
    """SIGHUP, which a shell sends to the parent, ends all ranks at once, without a wait for the end of a step."""
    process = start_long(programs)
    os.kill(process.pid, signal.SIGHUP)
    run = wait_for_clean_end(programs, process)
    assert (run.returncode, run.stderr) == (128 + signal.SIGHUP, "run.py: ended by SIGHUP\n")


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.05, 0.0])
def test_a_second_signal_changes_nothing(programs: Programs, pause: float) -> None:
    """SIGTERM shortly after Ctrl-C neither interrupts the cleanup nor adds a line."""
    process = start_long(programs)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(pause)
    os.kill(process.pid, signal.SIGTERM)
    run = wait_for_clean_end(programs, process)
    # If both signals are pending, the kernel may deliver either signal first.
    name = signal.Signals(run.returncode - 128).name
    assert name in ("SIGINT", "SIGINT" if pause else "SIGTERM")
    assert re.fullmatch(STOPPED.format(name), run.stderr)


@pytest.mark.slow
def test_repeated_ctrl_c(programs: Programs) -> None:
    """Ctrl-C every 5 ms until the run ends causes one line without a traceback, and leaves no process."""
    process = start_long(programs)
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.005)
    run = wait_for_clean_end(programs, process)
    assert run.returncode == 130
    # A Ctrl-C more than REPEAT seconds after the first ends the run in the middle of a step.
    assert re.fullmatch(f"{STOPPED.format('SIGINT')}|run.py: ended by SIGINT\n", run.stderr)


@pytest.mark.slow
def test_no_rank_outlives_its_parent(programs: Programs) -> None:
    """If the parent is killed, the ranks remove its temporary files and end."""
    process = start_long(programs)
    os.kill(process.pid, signal.SIGKILL)
    run = wait_for_clean_end(programs, process)
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("codes", "statuses", "expected"),
    [
        ([0, 0], [DONE, DONE], DONE),
        ([2, 2], [SHARED_ERROR, SHARED_ERROR], SHARED_ERROR),
        ([2, 2], [SHARED_ERROR, USER_ERROR], SHARED_ERROR),
        ([None, 2], [None, USER_ERROR], USER_ERROR),
        ([1, 2], [LOST_PEER, USER_ERROR], USER_ERROR),
        ([1, 1], [LOST_PEER, LOST_PEER], LOST_PEER),
        ([1, -9], [LOST_PEER, None], ExitStatus(1, "rank 1 was ended by signal 9 (SIGKILL)")),
        ([1, -40], [LOST_PEER, None], ExitStatus(1, "rank 1 was ended by signal 40")),
        ([1, 1], [LOST_PEER, None], ExitStatus(1, "rank 1 ended with code 1; see its message above")),
        ([0, None], [DONE, None], DONE),
    ],
)
def test_choose_status(codes: list[int | None], statuses: list[ExitStatus | None], expected: ExitStatus) -> None:
    """A killed rank takes precedence over a user error, and a user error over a lost peer, in any order of ranks."""
    assert choose_status(codes, statuses) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("SIGINT", 1), ("SIGINT", 2), ("SIGTERM", 1)])
def test_a_signal_while_starting(programs: Programs, name: str, ranks: int) -> None:
    """A signal right after the start of the first or the last rank ends the run, with one line."""
    programs.forks = False  # forked ranks start at once
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(find_ranks(process.pid)) >= ranks)
    # A terminal sends Ctrl-C to all processes.
    number = signal.Signals[name]
    (os.killpg if name == "SIGINT" else os.kill)(process.pid, number)
    run = wait_for_clean_end(programs, process)
    assert (run.returncode, run.stderr) == (128 + number, f"run.py: ended by {name}\n")


@pytest.mark.slow
def test_ctrl_c_before_the_first_rank(programs: Programs) -> None:
    """Ctrl-C ends the run if only multiprocessing's resource tracker has started."""
    programs.forks = False  # forked ranks start at once
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: any("resource_tracker" in command(pid) for pid in children(process.pid)), pause=0.0)
    os.killpg(process.pid, signal.SIGINT)
    run = wait_for_clean_end(programs, process)
    assert (run.returncode, run.stderr) == (130, "run.py: ended by SIGINT\n")


@pytest.mark.slow
def test_no_rank_outlives_its_parent_while_starting(programs: Programs) -> None:
    """If the parent is killed while the ranks import torch, the ranks end silently and remove its files."""
    programs.forks = False  # a fork has imported torch
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(find_ranks(process.pid)) == 2 and all(imports_torch(pid) for pid in find_ranks(process.pid)))
    os.kill(process.pid, signal.SIGKILL)
    run = wait_for_clean_end(programs, process)
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGKILL, "", "")


class ShellProcess:
    """Imitates a process of multiprocessing; ignores SIGTERM and SIGUSR1, and ends after a second."""

    def __init__(self) -> None:
        script = "trap '' TERM USR1; echo; sleep 1"
        self.process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.pid, self.sentinel = self.process.pid, os.pidfd_open(self.process.pid)

    @property
    def exitcode(self) -> int | None:
        """The exit code, or None while the process runs."""
        return self.process.poll()


def test_sigusr1_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGUSR1 after SIGTERM does not end the wait for the ranks, which may be saving."""
    monkeypatch.setattr("train.launch.signals.REPEAT", 0.1)
    rank: Any = ShellProcess()
    reader, writer = socket.socketpair()
    with reader, writer, rank.process:
        writer.send(bytes([signal.SIGTERM]))
        timer = threading.Timer(0.4, writer.send, [bytes([signal.SIGUSR1])])
        timer.start()
        assert wait_for_ranks([rank], reader) == signal.SIGTERM
        assert rank.exitcode == 0
        timer.join()
    os.close(rank.sentinel)
