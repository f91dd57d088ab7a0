"""Signals that end a run: at once while it starts, after an agreed step once it trains.

Python calls a handler only when its main thread comes back from C++, and inside a collective that can take as long as
--timeout. The number of a signal is written to a socket at once, though, and a thread reads it there.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from train.launch.leaving import INTERRUPTED, Ending, say, speaks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

INTERRUPT = 2.0  # seconds after Ctrl-C in which a process that starts may end in order
# Seconds in which a training must come to an agreed step: torchrun (multiprocessing/api.py, close) and SLURM (KillWait)
# end a process 30 s after they have asked it to end.
GRACE = 20.0
REPEAT = 1.0  # seconds: a terminal and torchrun both deliver one Ctrl-C; what comes later is a second one
# SLURM sends the last to tell that time is running out (--signal=USR1@60): nobody ends the process soon, so it may
# take its time.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def signals_as_bytes(*numbers: int) -> Iterator[socket.socket]:
    """Let these signals interrupt nothing during the block: each writes its number to the socket, as a byte."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # One that is ignored stays so: nohup and shells that start jobs in the background ignore some on purpose.
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number in numbers if before[number] is not signal.SIG_IGN]
    with reader, writer:
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in heard:
            signal.signal(number, lambda *_: None)
        try:
            yield reader
        finally:
            for number in heard:
                signal.signal(number, before[number])
            signal.set_wakeup_fd(descriptor)


@contextmanager
def held_back(*numbers: int) -> Iterator[None]:
    """Hold signals back, here until the end of the block, and for good in the processes that start in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        resource_tracker.ensure_running()  # multiprocessing starts it when it likes, and lets the signals through again
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Signals:
    """What this process has been told by signals.

    number: the one that asks it to stop, or 0. Only a program of its own listens: a library must not touch a process's
    signals.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.grace = grace
        self.number = 0
        self.speaks = True
        self._deferred = False
        self._raised = threading.Event()

    def listen(self, *, speaks: bool = True) -> None:
        """Begin: Ctrl-C ends this process, even one that waits inside torch for another rank.

        speaks: whether this process says how it ends when it cannot end in order. To be called on the main thread.
        """
        self.speaks = speaks
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handle(signal.SIGINT, self._interrupt)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # A fork shares the socket, and what it is told itself would be taken for this process's. The workers that load
        # data are none (train/loading.py), but a library may fork.
        os.register_at_fork(after_in_child=self._forget)
        sys.unraisablehook = _pass_over_interrupts
        threading.Thread(target=self._watch, daemon=True).start()

    def defer(self) -> None:
        """From now on signals of STOP end nothing at once: `number` tells of them, for the rest of this process.

        One that does not end within `grace` seconds is ended, as it is by a second signal. Without `listen` before,
        nothing changes.
        """
        if hasattr(self, "_reader"):
            self._deferred = True
            for number in (signal.SIGTERM, signal.SIGUSR1):
                self._handle(number, lambda *_: None)

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        # One that is ignored stays so: nohup and shells that start jobs in the background ignore some on purpose.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._deferred:
            self._raised.set()
            signal.default_int_handler(number, frame)

    def _forget(self) -> None:
        """In a fork: leave signals to the process that it works for, which goes on to an agreed step."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if self._deferred:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _watch(self) -> None:
        """Read the numbers; end the process when its time is up."""
        since = None  # when it was first told to end
        while True:
            left = None if since is None else since + self.grace - time.monotonic()
            if left is not None and left <= 0:
                self._leave(overdue(self.number, self.grace))
            if not select.select([self._reader], [], [], left)[0]:
                continue
            number = self._reader.recv(1)[0]
            if not self._deferred:
                if number == signal.SIGINT and not self._raised.wait(INTERRUPT):
                    self._leave(INTERRUPTED)
                self._raised.clear()  # Python has raised KeyboardInterrupt, maybe at a debugger's prompt
            elif number in STOP:
                if since is not None and number != signal.SIGUSR1 and time.monotonic() - since > REPEAT:
                    self._leave(ended_by(number))
                self.number = self.number or number
                if since is None and number != signal.SIGUSR1:
                    since = time.monotonic()

    def _leave(self, ending: Ending) -> None:
        if self.speaks and speaks(os.environ):
            say(ending)
        os._exit(ending.code)


def _pass_over_interrupts(unraisable: sys.UnraisableHookArgs) -> None:
    """Print what Python cannot raise, except a Ctrl-C that came within a destructor or a callback."""
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)


def ended_by(number: int) -> Ending:
    """Tell that a signal has ended this process at once."""
    return INTERRUPTED if number == signal.SIGINT else Ending(128 + number, f"ended by {name(number)}", alike=True)


def overdue(number: int, grace: float = GRACE) -> Ending:
    """Tell that the ranks could not stop in order."""
    text = f"ended by {name(number)}: the ranks did not come to an agreed step within {grace:g} s"
    return Ending(128 + number, f"{text}; what was saved before is whole", alike=True)


def name(number: int) -> str:
    """Give a signal's name, like SIGTERM."""
    return signal.Signals(number).name


SIGNALS = Signals()  # of this process, which has one set of signal handlers
