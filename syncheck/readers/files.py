"""One file as a checkpoint: which format its first bytes show, and its reader. A file's ending is never believed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, NotACheckpoint, UnreadableFile
from syncheck.readers import fingerprint_file, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.bookkeeping import settled
from syncheck.readers.opening import regular

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

READERS: dict[str, ModuleType] = {
    torch_zip.FORMAT: torch_zip,
    torch_legacy.FORMAT: torch_legacy,
    safetensors_file.FORMAT: safetensors_file,
    fingerprint_file.FORMAT: fingerprint_file,
}

# Endings by which people name checkpoints. In a folder, a file with one of these that no reader knows is damaged or
# unsupported, and said to be; any other is taken for a bystander.
ENDINGS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pkl", ".tar", ".distcp")
# Files that have such an ending and hold settings: transformers.Trainer pickles its arguments.
SETTINGS = ("training_args.bin",)
_HEAD = 64  # bytes; longer than any magic number in the table


def sniff(path: str) -> ModuleType | None:
    """Return the reader whose format the file's first bytes show, or None.

    Raises UnreadableFile when the bytes cannot be had; what is no regular file is not opened, a FIFO would block.
    """
    return _reader(_head(path))


def read_file(path: str) -> Snapshot:
    """Open a checkpoint that is one file, of any known format.

    Raises CheckpointError with the place, what was found and what to do next.
    """
    head = _head(path)
    reader = _reader(head)
    if reader is not None:
        try:
            snapshot: Snapshot = reader.read(path)
            return settled(snapshot)
        except OSError as error:
            raise UnreadableFile.because(path, error) from None
    if not head:
        raise MalformedFile(path, found="the file is empty", next_step="save or copy it again")
    raise NotACheckpoint(
        path,
        place="first bytes",
        found=repr(head[:12]),
        needed="a file of torch.save or safetensors, or a fingerprint",
    )


def _reader(head: bytes) -> ModuleType | None:
    return next((reader for reader in READERS.values() if reader.matches(head)), None)


def _head(path: str) -> bytes:
    try:
        with regular(path) as file:
            # A file of the kernel's, as /proc/kmsg, says that it is empty, and to read it may wait without end.
            return file.read(_HEAD) if os.fstat(file.fileno()).st_size else b""
    except (OSError, ValueError) as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else ""
        raise UnreadableFile.because(path, error, hint) from None
