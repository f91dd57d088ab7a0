"""Open untrusted files and parse untrusted JSON: without side effects, without blocking, and with limits.

The limits for the content of one file are documented in SECURITY.md. They are far above real checkpoints: the largest
published models have some hundred thousand tensors in a file, with the optimizer's, and a state dict some million
values. An untrusted file of 100 MB can claim a hundred million.
"""

from __future__ import annotations

import io
import os
import stat
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from syncheck.errors import MalformedFile, UnreadableFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

# Tensors of a safetensors file or a fingerprint.
MOST_TENSORS = 1_000_000
# Parts of all containers of a pickle.
MOST_ENTRIES = 5_000_000
# Objects in a pickle or in JSON, weighted by memory: 1 for some hundred bytes.
MOST_OBJECTS = 20_000_000
# The same for `.metadata` of torch.distributed.checkpoint, which has several objects per chunk: a million chunks.
MOST_INDEX_OBJECTS = 120_000_000
# Unknown classes of a pickle.
MOST_CLASSES = 10_000


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
        raise UnreadableFile(
            path,
            found="a folder",
            needed="a file, or a folder that is one checkpoint",
        )
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableFile(
            path,
            found="a pipe, socket or device",
            needed="a file",
        )


def read_whole(path: str, most: int, next_step: str) -> bytes:
    """Read a file of at most `most` bytes. Raises MalformedFile for a larger file, and as `open_regular_file` does."""
    with open_regular_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise MalformedFile(
                path,
                found=f"{size} bytes",
                needed=f"at most {most}",
                next_step=next_step,
            )
        return file.read(size)


def are_strings(value: Any) -> TypeGuard[Sequence[str]]:
    """Whether an untrusted value is a list or tuple of strings."""
    return isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)


def parse_json_object(
    raw: bytes, path: str, label: str, next_step: str, *, entry: bytes = b"", finite: bool = False
) -> dict[str, Any]:
    """Parse a JSON object, limiting the number of its parts before parsing, and without duplicate names.

    raw: UTF-8.
    path, label, next_step: for a MalformedFile; the label is the place in the file.
    entry: a quoted key of every tensor, to count the tensors.
    finite: refuse NaN and Infinity, which are not JSON but which Python accepts.
    """

    def refuse(problem: str, needed: str) -> NoReturn:
        raise MalformedFile(
            path,
            place=label,
            found=problem,
            needed=needed,
            next_step=next_step,
        ) from None

    if entry and raw.count(entry) > MOST_TENSORS:
        refuse(f"more than {MOST_TENSORS} tensors", "fewer")
    # A part of a container follows such a character.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MOST_OBJECTS:
        refuse(f"more than {MOST_OBJECTS} parts", "fewer")
    import json  # only here: files of torch.save have no JSON

    try:
        # Decoded as UTF-8, because json.loads would also accept UTF-16 and lone surrogates in bytes.
        content = json.loads(
            raw.decode(),
            object_pairs_hook=_refuse_duplicates,
            parse_constant=_refuse_constant if finite else None,
        )
    except (ValueError, RecursionError) as error:
        refuse(f"invalid JSON: {error!s:.100}", "a JSON object")
    if not isinstance(content, dict):
        refuse(type(content).__name__, "a JSON object")
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a duplicate name")
    return result


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"the constant {constant}")


class FileRange(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor of the whole file."""
        return self._file.fileno()

    def tell(self) -> int:
        """Return the position in the range."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Change the position in the range. Raises ValueError for a position before its start."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("an offset before the start of the record")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, at most up to the end of the range."""
        room = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        got = os.preadv(self.fileno(), [room], self._start + self._at) if len(room) else 0
        self._at += got
        return got
