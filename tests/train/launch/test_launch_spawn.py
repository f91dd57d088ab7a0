"""--spawn: this process starts the others, and answers for them."""

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
from programs import LONG, SHORT, TRAIN, assert_trained, children, command, find_ranks, imports_torch, wait_until_trains
from started import alive, wait_for

from train.launch.exits import ExitStatus
from train.launch.spawn import choose_status, wait_for_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from programs import Programs, Run

STOPPED = "run.py: stopped by {} after step \\d+; nothing was saved; .*--checkpoint-every N.*\n"
MISTAKE, ALIKE = ExitStatus(2, "only here"), ExitStatus(2, "everywhere", shared=True)
LOST, DONE = ExitStatus(1, "lost another rank"), ExitStatus()


def start_long(programs: Programs, *arguments: Any) -> subprocess.Popen[str]:
    """Start two ranks, and wait until they train."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG, *arguments)
    wait_until_trains(process)
    assert len(find_ranks(process.pid)) == 2
    return process


def finished(programs: Programs, process: subprocess.Popen[str]) -> Run:
    """Wait for the end, which leaves neither a process nor a file."""
    run = programs.finish(process)
    assert not alive(process)
    assert [path for path in programs.temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    return run


@pytest.mark.slow
def test_trains(programs: Programs, tmp_path: Path) -> None:
    """Two processes train ddp as torchrun's do, without any launcher; nothing of them is left."""
    run = finished(programs, programs.start(*TRAIN, "--spawn", 2, *SHORT))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[1] == "saved 2 files: ckpts/ddp_rank0.pth to ckpts/ddp_rank1.pth"
    assert_trained(tmp_path / "ckpts", 2)


@pytest.mark.slow
def test_mistakes_of_ranks_are_one_line(programs: Programs) -> None:
    """What the ranks refuse together is said once, with exit code 2."""
    run = finished(programs, programs.start(*TRAIN, "--spawn", 2, "--save-per-rank", "--out", "/dev/null/x"))
    message = "run.py: error: cannot write to --out /dev/null/x: Not a directory\n"
    assert (run.returncode, run.stdout, run.stderr) == (2, "", message)


@pytest.mark.slow
def test_a_killed_rank_is_named(programs: Programs) -> None:
    """A rank ended with -9 is named with its signal in one line, not the ones that lost it; exit code 1."""
    process = start_long(programs)
    os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
    run = finished(programs, process)
    assert (run.returncode, run.stderr) == (1, "run.py: error: rank 1 was ended by signal 9 (SIGKILL)\n")


@pytest.mark.slow
def test_a_stopped_rank_is_named(programs: Programs) -> None:
    """A rank that stands still is named after the others have waited --timeout for it, and is ended all the same."""
    process = start_long(programs, "--timeout", 2)
    os.kill(find_ranks(process.pid)[1], signal.SIGSTOP)
    run = finished(programs, process)
    assert run.returncode == 1
    assert re.match(r"run.py: error: rank 0 lost rank 1 \(", run.stderr)
    assert run.stderr.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_ends_all(programs: Programs) -> None:
    """Ctrl-C, which all processes of a terminal get, stops all after a step, in one line."""
    process = start_long(programs)
    os.killpg(process.pid, signal.SIGINT)
    run = finished(programs, process)
    assert run.returncode == 130
    assert re.fullmatch(STOPPED.format("SIGINT"), run.stderr)


@pytest.mark.slow
def test_a_closed_terminal_ends_all(programs: Programs) -> None:
    """SIGHUP, which the shell sends to the parent, ends every rank at once; nobody waits for a step."""
    process = start_long(programs)
    os.kill(process.pid, signal.SIGHUP)
    run = finished(programs, process)
    assert (run.returncode, run.stderr) == (128 + signal.SIGHUP, "run.py: ended by SIGHUP\n")


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.05, 0.0])
def test_a_second_signal_changes_nothing(programs: Programs, pause: float) -> None:
    """SIGTERM while Ctrl-C is heeded neither stops the cleaning up nor adds a line."""
    process = start_long(programs)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(pause)
    os.kill(process.pid, signal.SIGTERM)
    run = finished(programs, process)
    # Of two signals that wait for a process the kernel may let either be handled first.
    name = signal.Signals(run.returncode - 128).name
    assert name in ("SIGINT", "SIGINT" if pause else "SIGTERM")
    assert re.fullmatch(STOPPED.format(name), run.stderr)


@pytest.mark.slow
def test_an_impatient_user(programs: Programs) -> None:
    """Ctrl-C over and over, until all has ended, shows no traceback and leaves nothing; a late one ends it at once."""
    process = start_long(programs)
    while process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.005)
    run = finished(programs, process)
    assert run.returncode == 130
    assert re.fullmatch(f"{STOPPED.format('SIGINT')}|run.py: ended by SIGINT\n", run.stderr)


@pytest.mark.slow
def test_no_rank_outlives_its_parent(programs: Programs) -> None:
    """When the parent is killed, the ranks notice, remove what it cannot, and end."""
    process = start_long(programs)
    os.kill(process.pid, signal.SIGKILL)
    run = finished(programs, process)
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("codes", "notes", "expected"),
    [
        ([0, 0], [DONE, DONE], DONE),
        ([2, 2], [ALIKE, ALIKE], ALIKE),
        ([2, 2], [ALIKE, MISTAKE], ALIKE),
        ([None, 2], [None, MISTAKE], MISTAKE),
        ([1, 2], [LOST, MISTAKE], MISTAKE),
        ([1, 1], [LOST, LOST], LOST),
        ([1, -9], [LOST, None], ExitStatus(1, "rank 1 was ended by signal 9 (SIGKILL)")),
        ([1, -40], [LOST, None], ExitStatus(1, "rank 1 was ended by signal 40")),
        ([1, 1], [LOST, None], ExitStatus(1, "rank 1 ended with code 1; see its message above")),
        ([0, None], [DONE, None], DONE),
    ],
)
def test_the_cause_is_chosen(codes: list[int | None], notes: list[ExitStatus | None], expected: ExitStatus) -> None:
    """Who died comes before who refused, and that before who lost another; the first to end does not matter."""
    assert choose_status(codes, notes) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("SIGINT", 1), ("SIGINT", 2), ("SIGTERM", 1)])
def test_a_signal_while_starting(programs: Programs, name: str, ranks: int) -> None:
    """A signal as soon as the first rank, or the last, is there is neither lost nor answered by a traceback."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(find_ranks(process.pid)) >= ranks)
    # Ctrl-C reaches all processes of a terminal.
    number = signal.Signals[name]
    (os.killpg if name == "SIGINT" else os.kill)(process.pid, number)
    run = finished(programs, process)
    assert (run.returncode, run.stderr) == (128 + number, f"run.py: ended by {name}\n")


@pytest.mark.slow
def test_ctrl_c_before_the_first_rank(programs: Programs) -> None:
    """Ctrl-C when the helper that is started before all ranks has just come ends the run as well."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: any("resource_tracker" in command(pid) for pid in children(process.pid)), pause=0.0)
    os.killpg(process.pid, signal.SIGINT)
    run = finished(programs, process)
    assert (run.returncode, run.stderr) == (130, "run.py: ended by SIGINT\n")


@pytest.mark.slow
def test_no_rank_outlives_its_parent_while_starting(programs: Programs) -> None:
    """When the parent is killed while the ranks still import, they end without a word, and remove what it cannot."""
    process = programs.start(*TRAIN, "--spawn", 2, *LONG)
    wait_for(lambda: len(find_ranks(process.pid)) == 2 and all(imports_torch(pid) for pid in find_ranks(process.pid)))
    os.kill(process.pid, signal.SIGKILL)
    run = finished(programs, process)
    assert (run.returncode, run.stdout, run.stderr) == (-signal.SIGKILL, "", "")


class Shell:
    """A process as multiprocessing shows it, which is told to end and takes a second for it."""

    def __init__(self) -> None:
        script = "trap '' TERM USR1; echo; sleep 1"
        self.process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.pid, self.sentinel = self.process.pid, os.pidfd_open(self.process.pid)

    @property
    def exitcode(self) -> int | None:
        """Its exit code, None while it runs."""
        return self.process.poll()


def test_a_notice_is_no_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGUSR1 some time after SIGTERM does not cut short what the ranks save."""
    monkeypatch.setattr("train.launch.spawn.REPEAT", 0.1)
    rank: Any = Shell()
    reader, writer = socket.socketpair()
    with reader, writer, rank.process:
        writer.send(bytes([signal.SIGTERM]))
        notice = threading.Timer(0.4, writer.send, [bytes([signal.SIGUSR1])])
        notice.start()
        assert wait_for_ranks([rank], reader) == signal.SIGTERM
        assert rank.exitcode == 0
        notice.join()
    os.close(rank.sentinel)
