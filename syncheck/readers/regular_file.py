"""Open regular files only, without side effects and without blocking."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

from syncheck.errors import UnreadableFile


def open_regular_file(path: str) -> BinaryIO:
    """Open a file for reading. Raises UnreadableFile for a folder, pipe, socket or device, and OSError as `open` does.

    The type is checked first, because opening a device can have side effects, and again on the open file.
    """
    _check_type(path, os.stat(path))
    file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 - the caller closes it
    try:
        _check_type(path, os.fstat(file.fileno()))
    except UnreadableFile:
        file.close()
        raise
    return file


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _check_type(path: str, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise UnreadableFile(path, found="a folder", needed="a file, or a folder that is one checkpoint")
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile(path, found="a pipe, socket or device", needed="a file")
