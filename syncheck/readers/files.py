"""Detect the format of a checkpoint by its content, and read it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile, NotACheckpoint, UnreadableFile
from syncheck.readers import fingerprint_file, safetensors_file, torch_legacy, torch_zip
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.regular_file import open_regular_file

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

READERS: dict[str, ModuleType] = {
    torch_zip.FORMAT: torch_zip,
    torch_legacy.FORMAT: torch_legacy,
    safetensors_file.FORMAT: safetensors_file,
    fingerprint_file.FORMAT: fingerprint_file,
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
    if os.path.isdir(path):
        from syncheck.readers import folders  # imported for folders only, to start faster

        snapshot = folders.read_folder(path)
        if snapshot is not None:
            return snapshot
    return read_file(path)


def sniff(path: str) -> ModuleType | None:
    """Return the reader for a file's first bytes, or None.

    Raises UnreadableFile if they cannot be read. Only regular files are opened, because a FIFO would block.
    """
    return _find_reader(_read_head(path))


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the reader of a folder that is a single checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    from syncheck.readers import folders  # imported for folders only, to start faster

    return folders.sniff_folder(folder)


def read_file(path: str) -> Snapshot:
    """Open a checkpoint that is a single file. Raises CheckpointError."""
    head = _read_head(path)
    reader = _find_reader(head)
    if reader is not None:
        try:
            snapshot: Snapshot = reader.read(path)
            return remove_bookkeeping(snapshot)
        except OSError as error:
            raise UnreadableFile.because(path, error) from None
    if not head:
        raise MalformedFile(path, found="the file is empty", next_step="save or copy it again")
    raise NotACheckpoint(
        path,
        place="first bytes",
        found=repr(head[:12]),
        needed="a torch.save or safetensors file, or a fingerprint",
    )


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
