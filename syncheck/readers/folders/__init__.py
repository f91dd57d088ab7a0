"""Readers of folders that are a single checkpoint.

Imported only for folders, because it takes a considerable part of the time for comparing two small files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile
from syncheck.readers.dcp import folder as dcp
from syncheck.readers.folders import accelerate, deepspeed, huggingface, megatron

if TYPE_CHECKING:
    from types import ModuleType

    from syncheck.snapshots import Snapshot

# Each module has `matches_folder(folder)`, `read(folder)`, and `holds(relative)`: whether a file, by its path below the
# folder, belongs to the checkpoint and is not one itself. The first match reads the folder: Accelerate's folders also
# match transformers' format.
FOLDERS: dict[str, ModuleType] = {
    dcp.FORMAT: dcp,
    accelerate.FORMAT: accelerate,
    huggingface.FORMAT: huggingface,
    deepspeed.FORMAT: deepspeed,
    megatron.FORMAT: megatron,
}


def sniff_folder(folder: str) -> ModuleType | None:
    """Return the reader of a folder that is a single checkpoint, or None.

    Raises UnreadableFile for a folder that cannot be listed.
    """
    try:
        return next((reader for reader in FOLDERS.values() if reader.matches_folder(folder)), None)
    except (OSError, ValueError) as error:
        raise UnreadableFile.because(folder, error) from None


def read_folder(folder: str) -> Snapshot | None:
    """Open a folder that is a single checkpoint, or return None. Raises CheckpointError as `read` does."""
    reader = sniff_folder(folder)
    if reader is None:
        return None
    try:
        snapshot: Snapshot = reader.read(folder)
    except OSError as error:
        raise UnreadableFile.because(folder, error) from None
    return snapshot
