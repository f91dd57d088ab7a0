"""A text file that grows by whole lines, and whose loss does not end a run."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from train.errors import UserError
from train.launch.exits import print_line

if TYPE_CHECKING:
    from pathlib import Path


class LineFile:
    """Appends lines to a file, each with one write, so that they are there when the process is killed.

    Where a write fails later on, as on a full disk, what there is of the line is taken back, stderr gets one warning,
    and the next line is tried again: a training of days goes on without its log.
    """

    def __init__(self, path: Path, *, append: bool) -> None:
        """Make the folder and the file. append: keep what is there. Raises UserError with the system's reason."""
        self.path, self.warned = path, False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | (0 if append else os.O_TRUNC)
            self.file = os.open(path, flags | os.O_CLOEXEC, 0o666)
            self.size = os.lseek(self.file, 0, os.SEEK_END)
        except OSError as error:
            raise UserError(f"cannot write the log {path}: {error.strerror}") from error

    def write_first(self, text: str) -> None:
        """Write before the training starts. Raises UserError: nothing is lost yet."""
        try:
            self._append(text)
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {error.strerror}") from error

    def write(self, text: str) -> None:
        """Write whole lines; a failure is a warning, once."""
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
            while done < len(content):  # a disk that is nearly full takes a part
                done += os.pwrite(self.file, content[done:], self.size + done)
            self.size += done
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.file, self.size)
            raise

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a network's disk may tell of its failure only now
            os.close(self.file)


def warn_lost(path: Path, error: OSError) -> None:
    """Say once that a log has gaps."""
    print_line(f"warning: cannot write the log {path}: {error.strerror}; the training goes on")
