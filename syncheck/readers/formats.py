"""Detect the format of a single file by its content, and read it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, NotACheckpoint, UnreadableFile
from syncheck.readers import fingerprint_file, plain_pickle, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.untrusted import open_regular_file
from syncheck.suggestions import find_similar_path

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

READERS: dict[str, ModuleType] = {
    torch_zip.FORMAT: torch_zip,
    torch_legacy.FORMAT: torch_legacy,
    safetensors_file.FORMAT: safetensors_file,
    fingerprint_file.FORMAT: fingerprint_file,
    plain_pickle.FORMAT: plain_pickle,
}

# File extensions of checkpoints. In a folder, an unreadable file with a listed extension is reported; other files are
# skipped.
EXTENSIONS = (".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pkl", ".tar", ".distcp")
# Files with a listed extension that contain settings: transformers.Trainer pickles its arguments.
SETTINGS = ("training_args.bin",)
HEAD = 64  # bytes, more than any reader needs to recognize its format


def read_file(path: str) -> Snapshot:
    """Open a checkpoint that is a single file. Raises CheckpointError."""
    head = read_head(path)
    if reader := find_reader(head):
        return read_with(reader, path)
    if not head:
        raise MalformedFile(
            path,
            found="the file is empty",
            next_step="save or copy it again",
        )
    raise _describe_unread(path, head)


def _describe_unread(path: str, head: bytes) -> NotACheckpoint:
    """Return the error for a file that no reader matches."""
    # For errors only, to start faster.
    from syncheck.readers.unread import NEEDED, describe_file

    try:
        unread = describe_file(path, head)
    except OSError as error:
        raise UnreadableFile.because(path, error) from None

    if unread is None:
        return NotACheckpoint(
            path,
            place="first bytes",
            found=repr(head[:12]),
            needed=NEEDED,
        )
    return NotACheckpoint(
        path,
        found=unread.title,
        needed=NEEDED,
        next_step=unread.next_step,
    )


def read_with(reader: ModuleType, path: str) -> Snapshot:
    """Open a checkpoint with its reader. Raises CheckpointError."""
    try:
        return remove_bookkeeping(reader.read(path))
    except OSError as error:
        raise UnreadableFile.because(path, error) from None


def is_recognizable(path: str) -> bool:
    """Whether the first bytes of a file show that it is a checkpoint.

    Raises UnreadableFile if they cannot be read. Only regular files are opened, because a FIFO would block.
    """
    reader = find_reader(read_head(path))
    return reader is not None and not getattr(reader, "NEEDS_EXTENSION", False)


def find_reader(head: bytes) -> ModuleType | None:
    """Return the reader for the first bytes of a file, or None."""
    return next((reader for reader in READERS.values() if reader.matches(head)), None)


def read_head(path: str, size: int = HEAD) -> bytes:
    """Return the first bytes of a regular file. Raises UnreadableFile."""
    try:
        with open_regular_file(path) as file:
            # Kernel files like /proc/kmsg have size 0, and reading them can block.
            return file.read(size) if os.fstat(file.fileno()).st_size else b""
    except (OSError, ValueError) as error:
        hint = _advise_missing(path) if isinstance(error, FileNotFoundError) else ""
        raise UnreadableFile.because(path, error, hint) from None


def _advise_missing(path: str) -> str:
    """Return what to check if the file of a path is missing."""
    # The name exists, so that no other name was meant.
    if os.path.islink(path):
        return f"it is a link to {os.readlink(path)}, which is missing: copy the target, or remove the link"
    similar = find_similar_path(path)
    return f"did you mean {similar}?" if similar else "check the path"
