"""Detect the format of a checkpoint by its content, read it, and protect it from output files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, NotACheckpoint, UnreadableFile, UsageError
from syncheck.readers import fingerprint_file, plain_pickle, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.untrusted import open_regular_file

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
_HEAD = 64  # bytes, more than any reader needs to recognize its format


def read(path: str) -> Snapshot:
    """Open a checkpoint of any supported format, a file or a folder; the bytes of its tensors stay on disk.

        for name, tensor in read("ckpts/ddp_rank0.pth").tensors.items():
            print(name, tensor.dtype, tensor.shape)  # such as bn1.running_mean float32 (64,)

    path: of the file or folder. Its content determines the format; nothing in it is imported or executed.
    Raises CheckpointError with the location of the fault, the finding and the next step.
    """
    reader = sniff_folder(path) if os.path.isdir(path) else None
    return _read_with(reader, path) if reader else read_file(path)


def read_file(path: str) -> Snapshot:
    """Open a checkpoint that is a single file. Raises CheckpointError."""
    head = _read_head(path)
    if reader := _find_reader(head):
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
    return _find_reader(_read_head(path))


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
        head = _read_head(path)
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


def refuse_overwrite(path: str, option: str = "-o", *, replaceable: ModuleType | None = None) -> None:
    """Raise UsageError, with the option's name, if the output path is a checkpoint or belongs to a checkpoint.

    replaceable: the reader of a format that may be overwritten.
    """
    if os.path.isfile(path) and _is_part(path, replaceable):
        raise UsageError(f"{option} {path}: would overwrite a checkpoint; pass another path")


def _is_part(path: str, replaceable: ModuleType | None) -> bool:
    try:
        if sniff(path) not in (None, replaceable):
            return True
        # An index or a list of settings is not a checkpoint by itself.
        folder, name = os.path.split(os.path.realpath(path))
        folder_format = sniff_folder(folder)
    except UnreadableFile:
        return False
    return folder_format is not None and bool(folder_format.holds(name))


def _find_reader(head: bytes) -> ModuleType | None:
    return next((reader for reader in READERS.values() if reader.matches(head)), None)


def _read_head(path: str) -> bytes:
    try:
        with open_regular_file(path) as file:
            # Kernel files such as /proc/kmsg have size 0, and reading them can block.
            return file.read(_HEAD) if os.fstat(file.fileno()).st_size else b""
    except (OSError, ValueError) as error:
        hint = "check the path" if isinstance(error, FileNotFoundError) else ""
        raise UnreadableFile.because(path, error, hint) from None
