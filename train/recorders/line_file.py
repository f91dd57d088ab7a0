"""A log file of whole lines, whose write errors do not end the run."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from train.errors import UserError
from train.launch.exits import print_line

if TYPE_CHECKING:
    from pathlib import Path


class LineFile:
    """Appends each line with a single write, so that lines survive if the process is killed.

    If a write fails, for example on a full disk, the partial line is removed and one warning is printed on stderr. The
    run continues, and the next line is tried again.
    """

    def __init__(self, path: Path, *, append: bool) -> None:
        """Create the folder and the file. append: keep the existing contents. Raises UserError."""
        self.path, self.warned = path, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | (0 if append else os.O_TRUNC)
            self.file = os.open(path, flags | os.O_CLOEXEC, 0o666)
            self.size = os.lseek(self.file, 0, os.SEEK_END)
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror}") from error

    def write_first(self, text: str) -> None:
        """Write before training starts. Raises UserError, because nothing is lost yet."""
        try:
            self._append(text)
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {error.strerror}") from error

    def write(self, text: str) -> None:
        """Write whole lines. The first failure prints a warning."""
        try:
            self._append(text)
        except OSError as error:
            if not self.warned:
                self.warned = True
                warn_lost(self.path, error)

    def _append(self, text: str) -> None:
        content = text.encode()
        try:
            done = 0
            while done < len(content):  # a nearly full disk accepts a part
                done += os.pwrite(self.file, content[done:], self.size + done)
            self.size += done
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.file, self.size)
            raise

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # network file systems may report failures on close
            os.close(self.file)


def warn_lost(path: Path, error: OSError) -> None:
    """Print a warning that the log is incomplete."""
    print_line(f"warning: cannot write the log {path}: {error.strerror}; training continues")
