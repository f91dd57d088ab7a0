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
    from collections.abc import Sequence

    from syncheck.snapshots import Snapshot

_SECOND = re.compile(
    r"(?:original|metal|onnx|openvino|coreml|mlx|gguf)(?:/.*)?|consolidated[^/]*\.(?:pth|pt|safetensors)"
    r"|(?:pytorch_|diffusion_pytorch_)?model\.[\w-]+\.(?:safetensors|bin)"
)


def separate_copies(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the checkpoints without the second copies of the weights in Hugging Face folders, which get a note.

    Folders that all hold the same second copies are copies of each other, and nothing is removed.
    """
    folders = [s for s in snapshots if s.format in ("huggingface", "accelerate") and s.tensors]
    copies = {folder.path: _list_copies(folder, snapshots) for folder in folders}
    relative = {tuple(sorted(names)) for names in copies.values()}
    if len(folders) > 1 and len(relative) == 1:
        return [*snapshots]
    removed = {os.path.join(folder, name) for folder, names in copies.items() for name in names}
    kept = []
    for snapshot in snapshots:
        if snapshot.path in removed:
            continue
        if names := copies.get(snapshot.path):
            note = Note.UNUSED_WEIGHTS(folder=snapshot.path, files=tuple(names))
            snapshot = replace(snapshot, notes=(*snapshot.notes, note))
        kept.append(snapshot)
    return kept


def _list_copies(folder: Snapshot, snapshots: Sequence[Snapshot]) -> list[str]:
    """Return the paths of second copies below a folder."""
    start = os.path.join(folder.path, "")
    below = [snapshot.path.removeprefix(start) for snapshot in snapshots if snapshot.path.startswith(start)]
    return [name for name in below if _SECOND.fullmatch(name.replace(os.sep, "/"))]


def drop_unmatched_copies(models: Sequence[Snapshot]) -> list[Snapshot]:
    """Return two models without the second files of weights that only one of their folders has, with a note."""
    files = [_list_second_files(model) for model in models]
    common = set.intersection(*files)
    reduced = []
    for model, of_model in zip(models, files, strict=True):
        unmatched = sorted(of_model - common)
        if unmatched:
            prefixes = tuple(f"{name}." for name in unmatched)
            tensors = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(prefixes)}
            notes = [note for note in model.notes if note.parameters.get("file") not in unmatched]
            notes.append(Note.UNUSED_WEIGHTS(folder=model.path, files=tuple(unmatched)))
            model = replace(model, tensors=tensors, notes=tuple(notes))
        reduced.append(model)
    return reduced


def _list_second_files(model: Snapshot) -> set[str]:
    return {note.parameters["file"] for note in model.notes if note.code is Note.SECOND_WEIGHTS}
