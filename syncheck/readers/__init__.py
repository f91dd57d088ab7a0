"""Readers of checkpoint formats: one file each, chosen by content and never by a file's ending."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, NotACheckpoint, UnreadableFile, UnsupportedFormat
from syncheck.readers import safetensors_file, torch_zip

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

READERS: dict[str, ModuleType] = {torch_zip.FORMAT: torch_zip, safetensors_file.FORMAT: safetensors_file}

# Endings by which people name checkpoints. In a folder, a file with one of these that no reader knows is damaged or
# unsupported, and said to be; any other is taken for a bystander.
ENDINGS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pkl", ".tar", ".distcp")
# The legacy format's pickled magic number (torch/serialization.py, MAGIC_NUMBER, in protocol 2).
LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_HEAD = 64  # bytes; longer than any magic number in the table


def sniff(path: str) -> ModuleType | None:
    """Return the reader whose format the file's first bytes show, or None.

    Raises UnreadableFile when the bytes cannot be had; what is no regular file is not opened, a FIFO would block.
    """
    return _reader(_head(path))


def read(path: str) -> Snapshot:
    """Open a checkpoint of any known format.

    Raises CheckpointError with the place, what was found and what to do next.
    """
    head = _head(path)
    reader = _reader(head)
    if reader is not None:
        try:
            snapshot: Snapshot = reader.read(path)
        except OSError as error:
            raise UnreadableFile(path, found=error.strerror or str(error)) from None
        return snapshot
    if not head:
        raise MalformedFile(path, found="the file is empty", next_step="save or copy it again")
    if head.startswith(LEGACY):
        raise UnsupportedFormat(
            path,
            found="a torch.save file of before torch 1.6",
            next_step="load it and torch.save it again with today's torch",
        )
    raise NotACheckpoint(
        path,
        place="first bytes",
        found=repr(head[:12]),
        needed="a torch.save zip (PK\\x03\\x04) or a safetensors header",
    )


def _reader(head: bytes) -> ModuleType | None:
    return next((reader for reader in READERS.values() if reader.matches(head)), None)


def _head(path: str) -> bytes:
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
            raise UnreadableFile(path, found=what, needed="a file")
        with open(path, "rb") as file:
            return file.read(_HEAD)
    except OSError as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else ""
        raise UnreadableFile(path, found=(error.strerror or str(error)).lower(), next_step=hint) from None
    except ValueError as error:  # a NUL in the path
        raise UnreadableFile(path, found=str(error)) from None
