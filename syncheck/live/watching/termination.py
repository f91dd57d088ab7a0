"""SIGTERM in a watched process: torchrun sends it to all ranks as soon as one fails, while steps wait for the judge.

The process still ends by the signal, a moment later. Python runs handlers in the main thread, which may wait in a
collective forever; so a thread acts on the byte that Python writes to a pipe for each signal. A main thread that ends
watching goes on meanwhile, so that it can print the last line. A script with a handler of its own keeps it, and
processes that the script forks have the default again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_NUMBER = signal.SIGTERM
# Seconds within which the process ends.
_PATIENCE = 5


def flush_before_termination(flush: Callable[[], None], is_ending: Callable[[], bool]) -> None:
    """Call a function in a thread of its own before SIGTERM ends the process. It must return within a moment.

    Does nothing outside of the main thread, and in a program that handles the signal.

    is_ending: whether the main thread must go on meanwhile, because the function waits for it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(_NUMBER) != signal.SIG_DFL:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    if previous != -1:
        # The program waits for signals itself.
        signal.set_wakeup_fd(previous)
        return
    _ending.append(is_ending)
    _pipes.append(writing)
    signal.signal(_NUMBER, _wait_for_thread)
    os.register_at_fork(after_in_child=end_flushing)  # the child has no thread of ours
    threading.Thread(target=_watch, args=(reading, flush), name="syncheck-signals", daemon=True).start()


# Whether the main thread ends watching, and the pipe to the thread; empty while the signal has its default action.
_ending: list[Callable[[], bool]] = []
_pipes: list[int] = []


def _wait_for_thread(_number: int, _frame: Any) -> None:
    """Handle the signal in the main thread, if it runs: the other thread ends the process meanwhile."""
    if not any(is_ending() for is_ending in _ending):
        time.sleep(_PATIENCE)


def end_flushing() -> None:
    """Give the signal its default action again, and end the thread. Does nothing outside of the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(_NUMBER) is _wait_for_thread:
        _ending.pop()
        signal.signal(_NUMBER, signal.SIG_DFL)
        writing = _pipes.pop()
        current = signal.set_wakeup_fd(-1)
        if current != writing:
            # The program has set its own since then.
            signal.set_wakeup_fd(current)
        # The thread reads the end of the pipe.
        os.close(writing)


def _watch(reading: int, flush: Callable[[], None]) -> None:
    while numbers := os.read(reading, 1):
        # A handler that the script has installed since then decides.
        if numbers == bytes([_NUMBER]) and signal.getsignal(_NUMBER) is _wait_for_thread:
            try:
                flush()
            finally:
                # signal.signal works in the main thread only.
                ctypes.CDLL(None).signal(_NUMBER, signal.SIG_DFL)
                os.kill(os.getpid(), _NUMBER)
    os.close(reading)
