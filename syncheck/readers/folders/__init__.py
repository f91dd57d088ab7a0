"""Readers of folders that are a single checkpoint.

Imported only for folders, because it takes a considerable part of the time for comparing two small files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.readers.dcp import folder as dcp
from syncheck.readers.folders import accelerate, deepspeed, huggingface, megatron

if TYPE_CHECKING:
    from types import ModuleType

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
