"""Standard output whose write errors do not end the run."""

from __future__ import annotations

import io
import sys
from typing import TextIO


class Output(io.TextIOBase):
    """A file object that writes to the current sys.stdout, used on rank 0.

    If a write fails, for example because stdout is a file on a full disk, the run continues. Later output is dropped,
    and `lost` holds the error. BrokenPipeError is raised as usual, so that closing a pipe such as `| head` ends the
    run.
    """

    def __init__(self) -> None:
        self.lost: OSError | None = None

    def write(self, text: str, /) -> int:
        """Write the text and flush it, because logs are read during the run. Raises BrokenPipeError."""
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
        """Return whether stdout is a terminal."""
        return _stdout().isatty()

    def fileno(self) -> int:
        """Return the file descriptor, which rich needs to detect the width of the terminal."""
        return _stdout().fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Return the encoding; rich draws in ASCII if the encoding requires it."""
        return _stdout().encoding


def _stdout() -> TextIO:
    """Return the real stdout: while rich draws a bar, it replaces sys.stdout with a proxy that writes to Output."""
    stdout: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return stdout
