"""Standard output, whose loss does not end a run."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class Output(io.TextIOBase):
    """What rank 0 prints on: the stdout of the moment.

    A console that is lost, as where stdout is a file on a full disk, must not cost a training of days: what follows is
    dropped, and `lost` keeps the reason for the end. A pipe that nobody reads any more is raised, as ever: with
    `| head` that ends the run on purpose.
    """

    def __init__(self) -> None:
        self.lost: OSError | None = None

    def write(self, text: str, /) -> int:
        """Print the text and flush it, for a log is read while it grows. Raises BrokenPipeError."""
        if self.lost is None:
            try:
                _stdout().write(text)
                _stdout().flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                self.lost = error
        return len(text)

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return _stdout().isatty()

    def fileno(self) -> int:
        """Give the descriptor; rich asks for it to learn the width of the terminal."""
        return _stdout().fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Name the encoding; rich draws in ASCII where it has no more."""
        return _stdout().encoding


def _stdout() -> TextIO:
    """Give the real one: while rich draws a bar, it puts a stand-in in its place, which would lead back here."""
    stdout: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return stdout
