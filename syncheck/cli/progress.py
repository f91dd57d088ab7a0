"""Show how many bytes have been read, how fast, and how long the rest takes, on a terminal and after one second."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from syncheck.cli import output
from syncheck.tensors.traffic import TRAFFIC

if TYPE_CHECKING:
    from collections.abc import Iterator

# Seconds before the first line, and between two updates. Most comparisons are faster than the first.
_DELAY, _INTERVAL = 1.0, 0.5


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[None]:
    """Show the progress of a block on stderr, if stderr is a terminal. It disappears at the end of the block."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    is_done = Event()
    thread = Thread(target=_draw_until, args=(is_done,), daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # The user may not start more threads.
        yield
        return
    try:
        yield
    finally:
        is_done.set()
        thread.join()


def _draw_until(is_done: Event) -> None:
    """Draw the progress until the event is set."""
    if is_done.wait(_DELAY):
        return
    # Imports rich, which takes longer than most comparisons.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    class PlainConsole(Console):
        """Never hides the cursor: a signal that ends the process would leave it hidden."""

        @property
        def encoding(self) -> str:
            """The encoding, which selects the characters of the bar."""
            return "ascii" if output.needs_ascii() else super().encoding

        def show_cursor(self, show: bool = True) -> bool:
            return show

    progress = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=PlainConsole(stderr=True),
        # The report replaces it.
        transient=True,
        auto_refresh=False,
        # Other output of this process must not change while the progress is visible.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    # The terminal may have been closed.
    with suppress(OSError), progress:
        completed, total = _measure()
        task = progress.add_task("", total=total, completed=completed)
        while not is_done.wait(_INTERVAL):
            completed, total = _measure()
            progress.update(task, completed=completed, total=total)
            progress.refresh()


def _measure() -> tuple[int, int | None]:
    """Return the bytes read and the bytes to read, which are at least as many; None if they are unknown."""
    # Read once, because other threads add to it.
    completed = TRAFFIC.read
    if not TRAFFIC.expected:
        return completed, None
    # Different tensors, and tensors with other names under a map, are read a second time.
    return completed, max(TRAFFIC.expected, completed)
