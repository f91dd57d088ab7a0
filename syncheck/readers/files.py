"""Detect the format of a checkpoint by its content, and read it."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, NotACheckpoint, UnreadableFile
from syncheck.readers import fingerprint_file, plain_pickle, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.adapter_config import add_adapter_settings
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.untrusted import open_regular_file
from syncheck.readers.wrapped_values import unwrap_values

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.readers.unread import Unread
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
# Text files in which Megatron, DeepSpeed and TensorFlow name the newest checkpoint of a folder.
TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt", "checkpoint")
HEAD = 64  # bytes, more than any reader needs to recognize its format


def read(path: str) -> Snapshot:
    """Open a checkpoint of any supported format, a file or a folder; the bytes of its tensors stay on disk.

        for name, tensor in read("ckpts/ddp_rank0.pth").tensors.items():
            print(name, tensor.dtype, tensor.shape)  # such as bn1.running_mean float32 (64,)

    path: of the file or folder. Its content determines the format; nothing in it is imported or executed.
    Raises CheckpointError with the location of the fault, the finding and the next step.
    """
    reader = sniff_folder(path) if os.path.isdir(path) else None
    snapshot = _read_with(reader, path) if reader else read_file(path)
    return add_adapter_settings(unwrap_values(snapshot))


def read_file(path: str) -> Snapshot:
    """Open a checkpoint that is a single file. Raises CheckpointError."""
    head = read_head(path)
    if reader := find_reader(head):
        return _read_with(reader, path)
    if not head:
        raise MalformedFile(path, found="the file is empty", next_step="save or copy it again")
    raise _describe_unread(path, head)


def _describe_unread(path: str, head: bytes) -> NotACheckpoint:
    """Return the error for a file that no reader matches."""
    from syncheck.readers.unread import NEEDED, describe_file  # for errors only, to start faster

    try:
        unread = describe_file(path, head)
    except OSError as error:
        raise UnreadableFile.because(path, error) from None
    if unread is None:
        return NotACheckpoint(path, place="first bytes", found=repr(head[:12]), needed=NEEDED)
    return NotACheckpoint(path, found=unread.title, needed=NEEDED, next_step=unread.next_step)


def _read_with(reader: ModuleType, path: str) -> Snapshot:
    try:
        return remove_bookkeeping(reader.read(path))
    except OSError as error:
        raise UnreadableFile.because(path, error) from None


def sniff(path: str) -> ModuleType | None:
    """Return the reader for a file's first bytes, or None.

    Raises UnreadableFile if they cannot be read. Only regular files are opened, because a FIFO would block.
    """
    return find_reader(read_head(path))


def is_recognizable(path: str) -> bool:
    """Whether the first bytes of a file show that it is a checkpoint. Raises as `sniff`."""
    reader = sniff(path)
    return reader is not None and not getattr(reader, "NEEDS_EXTENSION", False)


def describe_unread(folder: str) -> Unread | None:
    """Return the format of a folder without checkpoints, or of its first file in such a format. Raises OSError."""
    from syncheck.readers.unread import describe_file, describe_folder  # for errors only, to start faster

    if unread := describe_folder(folder):
        return unread
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        head = read_head(path)
        unread = describe_file(path, head) if head else None
        if unread is not None:
            return unread._replace(title=f"{name} is {unread.title}")
    return None


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the reader of a folder that is a single checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    from syncheck.readers.folders import FOLDERS  # imported for folders only, to start faster

    try:
        return next((reader for reader in FOLDERS.values() if reader.matches_folder(folder)), None)
    except (OSError, ValueError) as error:
        raise UnreadableFile.because(folder, error) from None


def is_in_checkpoint(path: str, *, levels: int, only_parts: bool) -> bool:
    """Whether a file has the name of a checkpoint's file, or lies in a folder that is a single checkpoint.

    levels: the number of folders above the file to examine.
    only_parts: whether only the files count that the reader of the folder opens.
    """
    has_name = path.lower().endswith(EXTENSIONS) or os.path.basename(path) in TRACKERS
    if has_name and not only_parts:
        return True
    folder = path
    for _ in range(levels):
        folder = os.path.dirname(folder)
        reader = None
        with suppress(UnreadableFile):
            reader = sniff_folder(folder)
        if reader is None:
            continue
        if reader.holds(os.path.relpath(path, folder)) or not only_parts:
            return True
    return False


def find_reader(head: bytes) -> ModuleType | None:
    """Return the reader for the first bytes of a file, or None."""
    return next((reader for reader in READERS.values() if reader.matches(head)), None)


def read_head(path: str, size: int = HEAD) -> bytes:
    """Return the first bytes of a regular file. Raises UnreadableFile."""
    try:
        with open_regular_file(path) as file:
            # Kernel files such as /proc/kmsg have size 0, and reading them can block.
            return file.read(size) if os.fstat(file.fileno()).st_size else b""
    except (OSError, ValueError) as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else ""
        raise UnreadableFile.because(path, error, hint) from None
