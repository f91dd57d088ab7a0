"""The last line of `syncheck watch` if a rank ends early, while a launcher ends the other ranks by SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from support.started import CLONE, Processes, wait_for

from syncheck.live.watching.session import Session
from syncheck.live.watching.settings import WatchSettings
from syncheck.live.watching.termination import end_flushing, flush_before_termination

if TYPE_CHECKING:
    from pathlib import Path

# Rank 1 leaves; rank 0 notices it in its next reduction. It gets the signal as soon as it ends.
SCRIPT = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from syncheck.live.watching import judge

finish = judge.Judge.finish

def finish_slowly(judge, *limits):
    # As torchrun does while a rank ends after the failure of another one.
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    time.sleep(0.5)
    finish(judge, *limits)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(12):
    if step == 2 and rank == 1:
        optimizer.param_groups[0]["lr"] *= 3
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if step == 8 and rank == 1:
        sys.exit(3)
    if step == 8:
        judge.Judge.finish = finish_slowly
"""


@pytest.mark.slow
def test_sigterm_while_the_first_rank_ends(tmp_path: Path) -> None:
    """The error of the script and the last line are printed once, before the process ends by the signal."""
    (tmp_path / "leaves.py").write_text(SCRIPT)
    processes = Processes(tmp_path)
    # The launcher looks seldom: its own signal, after the end of rank 1, would come before or after rank 0's error.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launcher += ["--monitor-interval", "4"]
    process = processes.start(*launcher, "-m", "syncheck", "watch", "leaves.py", PYTHONPATH=CLONE)
    try:
        _, errors = process.communicate(timeout=110)
    finally:
        processes.kill()
    lines = [line for line in errors.splitlines() if line.startswith("syncheck: ")]
    assert process.returncode == 1
    assert "RuntimeError: " in errors
    assert len([line for line in lines if ": SYN107 settings-differ (error, proved)" in line]) == 1, errors
    assert [line.partition(": ")[2].partition(":")[0] for line in lines if "watched" in line] == ["OUT OF SYNC"]


@pytest.fixture
def session() -> Any:
    """Return a session whose judge does nothing, and whose process trained nothing."""
    session = Session(WatchSettings())
    session.watcher = SimpleNamespace(is_on=True, has_posted=True, tell_end=bool, steps=[])  # type: ignore[assignment]
    session._judge = SimpleNamespace(hasten=lambda *_: None, finish=lambda *_: None)  # type: ignore[assignment]
    return session


def test_the_signal_waits_for_the_last_line(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends is not ended a second time, and the process not before its end."""
    order: list[str] = []

    def end_slowly(**_: Any) -> None:
        assert session._is_ending()
        signals.start()
        time.sleep(0.3)
        session._is_concluded = True
        order.append("last line")

    def handle_signal() -> None:
        session._flush()
        order.append("killed")

    signals = threading.Thread(target=handle_signal)
    monkeypatch.setattr(session, "_end_watching", end_slowly)
    assert not session._is_ending()
    session.finish(normally=False)
    signals.join()
    assert order == ["last line", "killed"]
    assert not session._is_ending()


def test_the_signal_does_not_wait_forever(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the end of a session takes too long, the signal ends the process, after the last line.

    The main thread may wait for another rank before it prints the line.
    """
    monkeypatch.setattr("syncheck.live.watching.session._SIGNAL_SECONDS", 0.1)
    lines: list[str] = []
    monkeypatch.setattr(session, "_conclude", lambda _judge, **_: lines.append("last line"))
    session._has_ended = True
    for is_concluded in (False, True):
        session._is_concluded = is_concluded
        begin = time.monotonic()
        session._flush()
        assert 0.1 <= time.monotonic() - begin < 10
        assert lines == ["last line"]


def test_the_main_thread_goes_on_while_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The handler holds up a script, so that it takes no further step, and not the end of watching."""
    from syncheck.live.watching import termination

    naps: list[float] = []
    monkeypatch.setattr(termination.time, "sleep", naps.append)
    for is_ending in (True, False):
        monkeypatch.setattr(termination, "_ending", [lambda is_ending=is_ending: is_ending])
        termination._wait_for_thread(signal.SIGTERM, None)
        assert bool(naps) is not is_ending


def test_the_signal_has_its_default_action_after_watching() -> None:
    """The handler, the thread and the pipe are gone at the end; a pipe of the program is kept."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    threads, pipes = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for wakeup in (-1, writing):
        flush_before_termination(lambda: None, lambda: False)
        if wakeup == writing:
            signal.set_wakeup_fd(writing)
        end_flushing()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == wakeup
        wait_for(lambda: threading.active_count() == threads)
        assert len(os.listdir("/proc/self/fd")) == pipes
    os.close(reading)
    os.close(writing)
