"""Open a file that a checkpoint lies in: nothing else is opened, and nothing makes the reader wait."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from syncheck.errors import UnreadableFile


def regular(path: str) -> BinaryIO:
    """Open a file to read. Raises UnreadableFile for a folder, pipe, socket or device, OSError as `open` does.

    A device is not opened, which alone may do something. What becomes a pipe meanwhile does not block.
    """
    _check(path, os.stat(path))
    file = open(path, "rb", opener=_at_once)  # noqa: SIM115 - it is closed by who asked for it
    try:
        _check(path, os.fstat(file.fileno()))
    except UnreadableFile:
        file.close()
        raise
    return file


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _check(path: str, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise UnreadableFile(path, found="a folder", needed="a file, or a folder that is one checkpoint")
    if not stat.S_ISREG(found.st_mode):
        raise UnreadableFile(path, found="a pipe, socket or device", needed="a file")
