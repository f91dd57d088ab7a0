"""Folders with one file for each thing that is saved: weights, optimizer, scheduler, scaler, random states.

transformers' Trainer (`checkpoint-500/`) and Accelerate's `save_state` write them, with the names of
transformers/trainer.py and accelerate/utils/constants.py. Weights may be one file, or several that an index names:
`model.safetensors.index.json`, which huggingface_hub/serialization/_base.py writes, or `pytorch_model.bin.index.json`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnreadableFile, brief
from syncheck.messages import Note
from syncheck.readers.assembly import Assembly, as_stored
from syncheck.readers.bookkeeping import settled
from syncheck.readers.files import read_file
from syncheck.readers.folders.inside import names_in, numbered, read_json
from syncheck.readers.pickles.optimizer_names import named_by_order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from syncheck.snapshots import Snapshot

FORMAT = "huggingface"
_INDEX = re.compile(r"(?P<stem>[^/]+)\.(?P<ending>safetensors|bin)\.index(?:\.[\w-]+)?\.json")
_SHARD = re.compile(r"[^/]+-\d{5}-of-\d{5}(?:\.[\w-]+)?\.(?:safetensors|bin)")
_AGAIN = "save or copy the whole folder again"
_WEIGHTS = re.compile(
    r"(?P<stem>(?:pytorch_|adapter_|diffusion_pytorch_)?model)(?P<number>_\d+)?\.(?P<ending>safetensors|bin)"
)
# What stands beside the weights, and what its names begin with; the group is a number, empty where there is none.
_BESIDE = {
    re.compile(r"optimizer(?:_(\d+))?\.(?:pt|bin)"): "optimizer",
    re.compile(r"(?:lr_)?scheduler(?:_(\d+))?\.(?:pt|bin)"): "scheduler",
    re.compile(r"scaler\.(?:pt|bin)()"): "scaler",
    re.compile(r"sampler(?:_(\d+))?\.bin"): "sampler",
    re.compile(r"dl_state_dict(?:_(\d+))?\.bin"): "dataloader",
    re.compile(r"custom_checkpoint_(\d+)\.pkl"): "custom_checkpoint",
    re.compile(r"rng_state(?:_(\d+))?\.pth"): "rng_state",
    re.compile(r"random_states_(\d+)\.pkl"): "random_states",
}
# Of these there may be one for each rank or object, so that their number is said even where there is one.
_NUMBERED = ("custom_checkpoint",)
_OF_RANKS = ("rng_state", "random_states")
_PROGRESS = "trainer_state.json"
# By these a folder with one known file of weights is told from any folder that has a file of that name.
_COMPANIONS = frozenset({"config.json", "adapter_config.json", "generation_config.json", _PROGRESS})


def _read_index(path: str) -> Snapshot:
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


def has_weights(names: Iterable[str]) -> bool:
    """Whether there are weights among the files of a folder, as one file of a known name or with an index."""
    return any(_WEIGHTS.fullmatch(name) or _INDEX.fullmatch(name) for name in names)


def matches_folder(folder: str) -> bool:
    """Whether a folder holds an index of weights, or weights and what libraries put beside them.

    On other nodes than the first, Trainer saves all but the weights.
    """
    names = names_in(folder)
    if any(_INDEX.fullmatch(name) for name in names):
        return True
    beside = any(pattern.fullmatch(name) for pattern in _BESIDE for name in names)
    if _PROGRESS in names and beside:
        return True
    return has_weights(names) and (beside or not _COMPANIONS.isdisjoint(names))


def holds(relative: str) -> bool:
    """Whether a file, by its path below the folder, belongs to such a checkpoint."""
    patterns = (_WEIGHTS, _SHARD, _INDEX, *_BESIDE)
    return relative == _PROGRESS or any(pattern.fullmatch(relative) for pattern in patterns)


def read(folder: str, format_name: str = FORMAT) -> Snapshot:
    """Open such a folder: the model's tensors, `optimizer.*`, `scheduler.*` and so on, and how far the run was.

    Raises CheckpointError for a file of it that cannot be read.
    """
    names = names_in(folder)
    whole = Assembly(folder, format_name)
    in_order = _add_weights(whole, names)
    for pattern, top in _BESIDE.items():
        found = numbered(pattern, names)
        for match in found:
            # A file that is the only one of its kind needs no number, unless that says that others are missing:
            # optimizer_1.bin alone is of the second optimizer, but random states may be of any one rank.
            alone = len(found) == 1 and top not in _NUMBERED and (top in _OF_RANKS or not int(match[1] or 0))
            # Of several, the one without a number is the first, but rng_state.pth is that of a single process.
            label = "" if alone else (match[1] or ("" if top == "rng_state" else "0"))
            whole.add(read_file(os.path.join(folder, match.string)), _below(top, label))
    if in_order:
        _name_parameters(whole)
    if _PROGRESS in names:
        state = read_json(os.path.join(folder, _PROGRESS))
        progress = {key: state.get(key) for key in ("global_step", "epoch")}
        whole.values |= {key: value for key, value in progress.items() if isinstance(value, (int, float))}
    return settled(whole.snapshot())


def _below(top: str, label: str) -> Callable[[str], str]:
    """Return how to name what a file holds that is all of one thing, such as `optimizer`.

    top: what the names begin with; those that begin so already get it once. label: what tells this file from others
    of its kind, empty where there is no other.
    """
    start = f"{top}.{label}" if label else top

    def rename(name: str) -> str:
        inner = name.removeprefix(f"{top}.")
        return f"{start}.{inner}" if inner else start

    return rename


def _add_weights(whole: Assembly, names: list[str]) -> bool:
    """Add the weights of each model, and other files of weights under their own names.

    Returns whether the tensors are in the model's order: safetensors and indexes are sorted by name.
    """
    slots = _weights(names)
    for slot, name in slots.items():
        path = os.path.join(whole.folder, name)
        part = _read_index(path) if _INDEX.fullmatch(name) else read_file(path)
        # Accelerate saves several models side by side: model.safetensors, model_1.safetensors.
        # One with a number is not the first, also where that is missing.
        first = slot == next(iter(slots)) and not ((one := _WEIGHTS.fullmatch(name)) and one["number"])
        whole.add(part, as_stored if first else _below(slot, ""))
    used = {os.path.relpath(path, whole.folder) for path in {tensor.path for tensor in whole.tensors.values()}}
    weights = {name for name in names if _WEIGHTS.fullmatch(name) or _SHARD.fullmatch(name)}
    for name in sorted(weights - used - set(slots.values())):
        # Another copy of the weights, or a shard that the index no longer names: libraries may load it instead.
        whole.add(read_file(os.path.join(whole.folder, name)), _below(name, ""))
        whole.notes.append(Note.OTHER_WEIGHTS(file=name, others=", ".join(slots.values())))
    return [bool(_WEIGHTS.fullmatch(name)) and name.endswith(".bin") for name in slots.values()] == [True]


def _name_parameters(whole: Assembly) -> None:
    """Give the optimizer's states the names of their parameters, where the order tells them."""
    groups = {name.split(".")[2] for name in whole.values if name.startswith("optimizer.param_groups.")}
    found = named_by_order({name: tensor.shape for name, tensor in whole.tensors.items()}, len(groups))
    full = {name: found.get(name, name) for name in whole.tensors}
    whole.tensors = {full[name]: replace(tensor, name=full[name]) for name, tensor in whole.tensors.items()}


def _weights(names: list[str]) -> dict[str, str]:
    """Choose the file or index of each model: where both formats lie there, safetensors, as transformers does."""
    found: dict[str, tuple[int, int, str]] = {}
    for name in names:
        index, one = _INDEX.fullmatch(name), _WEIGHTS.fullmatch(name)
        match = index or one
        if match is None:
            continue
        slot = match["stem"].removeprefix("pytorch_") + (match["number"] or "" if one else "")
        # One file before an index, as transformers.PreTrainedModel.from_pretrained looks for them.
        rank = 2 * (match["ending"] == "bin") + (index is not None)
        # And of two indexes the one without a variant in its name.
        chosen = rank, len(name), name
        found[slot] = min(found.get(slot, chosen), chosen)
    return {slot: name for slot, (_, _, name) in sorted(found.items(), key=lambda item: (item[0] != "model", item[0]))}
