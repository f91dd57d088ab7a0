"""Readers of checkpoint formats: one file each, chosen by content and never by a file's ending.

A checkpoint is one file (the table `READERS` in files.py) or a folder of files that belong together (the table
`FOLDERS` in folders/).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile, UsageError
from syncheck.readers.files import ENDINGS, READERS, SETTINGS, read_file, sniff

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

__all__ = [
    "ENDINGS",
    "READERS",
    "SETTINGS",
    "keep",
    "read",
    "sniff",
    "sniff_folder",
]


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the format of a folder that is itself one checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    from syncheck.readers import folders  # for folders only

    return folders.sniff_folder(folder)


def read(path: str) -> Snapshot:
    """Open a checkpoint of any known format, a file or a folder; the bytes of its tensors stay on disk.

        for name, tensor in read("ckpts/ddp_rank0.pth").tensors.items():
            print(name, tensor.dtype, tensor.shape)  # such as bn1.running_mean float32 (64,)

    path: of the file or folder; the format is told by its content. Nothing in it is imported or run.
    Raises CheckpointError with the place, what was found and what to do next.
    """
    if os.path.isdir(path):
        from syncheck.readers import folders  # for folders only

        found = folders.read_folder(path)
        if found is not None:
            return found
    return read_file(path)


def keep(path: str, option: str = "-o", *, but: ModuleType | None = None) -> None:
    """Raise UsageError, naming the option, where a checkpoint lies, or a file of a folder that is one.

    but: the reader of a format that may be replaced.
    """
    if os.path.isfile(path) and _is_part(path, but):
        raise UsageError(f"{option} {path}: a checkpoint lies there, and it would be lost; name another file")


def _is_part(path: str, but: ModuleType | None) -> bool:
    try:
        if sniff(path) not in (None, but):
            return True
        # An index or a list of settings is no checkpoint by itself.
        folder, name = os.path.split(os.path.realpath(path))
        whole = sniff_folder(folder)
    except UnreadableFile:
        return False
    return whole is not None and bool(whole.holds(name))
