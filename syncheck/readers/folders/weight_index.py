"""Weights in several files with an index: `model.safetensors.index.json` says which file holds which tensor.

The files are named in the index, relative to its folder; `pytorch_model.bin.index.json` is the same for torch.save.
Written by huggingface_hub/serialization/_base.py and read by transformers/utils/hub.py.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnreadableFile, brief
from syncheck.readers.assembly import Assembly
from syncheck.readers.files import read_file
from syncheck.readers.folders.inside import read_json

if TYPE_CHECKING:
    from syncheck.snapshots import Snapshot

INDEX = re.compile(r"(?P<stem>[^/]+)\.(?P<ending>safetensors|bin)\.index(?:\.[\w-]+)?\.json")
SHARD = re.compile(r"[^/]+-\d{5}-of-\d{5}(?:\.[\w-]+)?\.(?:safetensors|bin)")
_AGAIN = "save or copy the whole folder again"


def read_index(path: str) -> Snapshot:
    """Open the weights that an index names. path: the index.

    Raises CheckpointError, of the index, when a file is missing or lies outside the folder, when a tensor is not in
    its file, and when a file holds one that the index gives to no file or to another.
    """
    folder = os.path.dirname(path)
    where = _weight_map(path)
    whole = Assembly(folder, "")
    tensors_in: dict[str, dict[str, None]] = {}  # in the order of the index
    for tensor, name in where.items():
        tensors_in.setdefault(name, {})[tensor] = None
    for name, wanted in sorted(tensors_in.items()):
        file = os.path.join(folder, name)
        if not os.path.lexists(file):
            first = next(iter(wanted))
            raise UnreadableFile(path, place=f"tensor '{first}'", found=f"the file {name} is missing", next_step=_AGAIN)
        part = read_file(file)
        for tensor in part.tensors:
            if where.get(tensor) != name:
                other = where.get(tensor)
                gives = f"the index gives it to {other}" if other else "the index does not name it"
                raise _malformed(path, tensor, f"it is in {name}, but {gives}", "one file for each tensor")
        for tensor in sorted(wanted.keys() - part.tensors.keys()):
            raise _malformed(path, tensor, f"it is not in {name}", f"{len(wanted)} tensors in that file")
        whole.add(part)
    whole.bytes += os.stat(path).st_size
    # In the order of the index, which is that of the model where nobody sorted it.
    whole.tensors = {tensor: whole.tensors[tensor] for tensor in where}
    return whole.snapshot()


def _weight_map(path: str) -> dict[str, str]:
    """Return which file holds which tensor, with no file outside the folder."""
    where: Any = read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise MalformedFile(
            path, place="weight_map", found=brief(where), needed="a file name for each tensor", next_step=_AGAIN
        )
    for tensor, name in where.items():
        if not name or "\0" in name or os.path.isabs(name) or ".." in re.split(r"[/\\]", name):
            raise _malformed(path, tensor, f"the file {brief(name)}", "a file in the folder of the index")
    return where


def _malformed(path: str, tensor: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(path, place=f"tensor '{tensor}'", found=found, needed=needed, next_step=_AGAIN)
