"""Separate the model of a Hugging Face folder from other copies of its weights in the folder.

Published folders hold them for other programs: `original/consolidated.00.pth` in Meta's names,
`consolidated.safetensors` in Mistral's names, `pytorch_model.bin` for old versions of transformers, and variants like
`model.fp16.safetensors`. transformers reads `model.safetensors` only.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.messages import Note

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.snapshots import Snapshot, Tensor

_FORMATS = ("huggingface", "accelerate")
# Other files and folders may hold modules of the model, like `2_Dense/` of sentence-transformers.
_SECOND = (
    r"(?:original|metal|onnx|openvino|coreml|mlx|gguf)(?:/.*)?|consolidated[^/]*\.(?:pth|pt|safetensors)"
    r"|(?:pytorch_|diffusion_pytorch_)?model\.[\w-]+\.(?:safetensors|bin)"
)


def separate_copies(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the checkpoints without the second copies of the weights in Hugging Face folders, which get a note.

    Folders that all hold the same second copies are copies of each other, and nothing is removed.
    """
    copies: dict[str, frozenset[str]] = {}
    remaining: dict[str, Snapshot] = {}
    for snapshot in snapshots:
        remaining[snapshot.path] = snapshot
        if snapshot.format in _FORMATS:
            copies[snapshot.path] = _list_copies(snapshot, snapshots)

    # Replicas of a folder are compared as a whole, so a difference in a second copy counts, too.
    distinct_copies = set(copies.values())
    if len(copies) > 1 and len(distinct_copies) == 1:
        return list(snapshots)

    for folder, names in copies.items():
        remaining[folder] = _note_unused(remaining[folder], names)
        for name in names:
            # A folder with copies may be a copy of the weights in a folder above.
            remaining.pop(os.path.join(folder, name), None)

    return list(remaining.values())


def _list_copies(folder: Snapshot, snapshots: Sequence[Snapshot]) -> frozenset[str]:
    """Return the paths of second copies, relative to their folder. A folder without weights has no copies of them."""
    if not folder.tensors:
        return frozenset()

    start = os.path.join(folder.path, "")
    names: set[str] = set()
    for snapshot in snapshots:
        is_in_folder = snapshot.path.startswith(start)
        name = snapshot.path.removeprefix(start).replace(os.sep, "/")
        if is_in_folder and re.fullmatch(_SECOND, name):
            names.add(name)

    return frozenset(names)


def drop_unmatched_copies(models: Sequence[Snapshot]) -> list[Snapshot]:
    """Return two models without the second files of weights that only one of their folders has, with a note.

    The reader puts the name of such a file before the names of its tensors.
    """
    first, second = models
    first_files = _list_second_files(first)
    second_files = _list_second_files(second)
    # If both folders have the file, its weights are compared.
    return [_drop_files(first, first_files - second_files), _drop_files(second, second_files - first_files)]


def _list_second_files(model: Snapshot) -> set[str]:
    """Return the second files of weights, which the reader of a folder lists in notes."""
    return {note.parameters["file"] for note in model.notes if note.code is Note.SECOND_WEIGHTS}


def _drop_files(model: Snapshot, files: Collection[str]) -> Snapshot:
    """Return a model without the tensors of some files, and without the notes that announced a comparison."""
    prefixes = tuple(f"{file}." for file in files)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.tensors.items():
        if not name.startswith(prefixes):
            tensors[name] = tensor

    # The note of the reader promised a comparison.
    notes = tuple(note for note in model.notes if note.parameters.get("file") not in files)
    reduced = replace(model, tensors=tensors, notes=notes)
    return _note_unused(reduced, files)


def _note_unused(snapshot: Snapshot, files: Collection[str]) -> Snapshot:
    """Return a checkpoint with a note about files that are not compared, if there are any."""
    if not files:
        return snapshot

    note = Note.UNUSED_WEIGHTS(folder=snapshot.path, files=tuple(sorted(files)))
    return replace(snapshot, notes=(*snapshot.notes, note))
