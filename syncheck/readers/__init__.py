"""Readers of checkpoint formats: one file each, chosen by content and never by a file's ending.

A checkpoint is one file (the table `READERS` in files.py) or a folder of files that belong together (`FOLDERS`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile
from syncheck.readers import accelerate_dir, dcp_dir, deepspeed_dir, hf_index, megatron_dir
from syncheck.readers.files import ENDINGS, READERS, SETTINGS, read_file, sniff

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

__all__ = [
    "ENDINGS",
    "FOLDERS",
    "READERS",
    "SETTINGS",
    "read",
    "read_file",
    "sniff",
    "sniff_folder",
]


# Each has `matches_folder(folder)`, `read(folder)`, and `holds(relative)`: whether a file, by its path below the
# folder, belongs to such a checkpoint and so is none of its own. The first that fits is taken: Accelerate's folders
# look like those of transformers, with more in them.
FOLDERS: dict[str, ModuleType] = {
    dcp_dir.FORMAT: dcp_dir,
    accelerate_dir.FORMAT: accelerate_dir,
    hf_index.FORMAT: hf_index,
    deepspeed_dir.FORMAT: deepspeed_dir,
    megatron_dir.FORMAT: megatron_dir,
}


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the format of a folder that is itself one checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    try:
        return next((found for found in FOLDERS.values() if found.matches_folder(folder)), None)
    except (OSError, ValueError) as error:
        raise UnreadableFile(folder, found=str(getattr(error, "strerror", None) or error).lower()) from None


def read(path: str) -> Snapshot:
    """Open a checkpoint of any known format, a file or a folder.

    Raises CheckpointError with the place, what was found and what to do next.
    """
    found = sniff_folder(path) if os.path.isdir(path) else None
    if found is None:
        return read_file(path)
    try:
        snapshot: Snapshot = found.read(path)
    except OSError as error:
        raise UnreadableFile(path, found=error.strerror or str(error)) from None
    return snapshot
