"""Folders of files that belong together as a checkpoint: which format a folder is of, and its reader.

Imported when a folder was given: these readers take a good part of the time that comparing two small files takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile
from syncheck.readers.dcp import folder as dcp
from syncheck.readers.folders import accelerate, deepspeed, huggingface, megatron

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

# Each has `matches_folder(folder)`, `read(folder)`, and `holds(relative)`: whether a file, by its path below the
# folder, belongs to such a checkpoint and so is none of its own. The first that fits is taken: Accelerate's folders
# look like those of transformers, with more in them.
FOLDERS: dict[str, ModuleType] = {
    dcp.FORMAT: dcp,
    accelerate.FORMAT: accelerate,
    huggingface.FORMAT: huggingface,
    deepspeed.FORMAT: deepspeed,
    megatron.FORMAT: megatron,
}


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the format of a folder that is itself one checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    try:
        return next((found for found in FOLDERS.values() if found.matches_folder(folder)), None)
    except (OSError, ValueError) as error:
        raise UnreadableFile.because(folder, error) from None


def read_folder(folder: str) -> Snapshot | None:
    """Open a folder that is itself one checkpoint; None where it is none. Raises CheckpointError as `read` does."""
    found = sniff_folder(folder)
    if found is None:
        return None
    try:
        snapshot: Snapshot = found.read(folder)
    except OSError as error:
        raise UnreadableFile.because(folder, error) from None
    return snapshot
