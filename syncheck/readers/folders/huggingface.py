"""Folders with separate files for weights, optimizer, scheduler, scaler and RNG states.

The formats are transformers' Trainer (`checkpoint-500/`) and Accelerate's `save_state`, with file names from
transformers/trainer.py and accelerate/utils/constants.py. Weights are one file, or several files with an index:
`model.safetensors.index.json`, as in huggingface_hub/serialization/_base.py, or `pytorch_model.bin.index.json`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnreadableFile
from syncheck.messages import Note
from syncheck.readers.assembly import Assembly, match_in_order
from syncheck.readers.formats import read_file
from syncheck.readers.pickles.optimizer_names import match_by_order
from syncheck.readers.untrusted import parse_json_object, read_whole
from syncheck.text import brief

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
# Files besides the weights, and the prefix of their names. The group is the file's number, if any.
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
# Files that keep their number in names even if there is only one, because they belong to a numbered object.
_NUMBERED = ("custom_checkpoint",)
_OF_RANKS = ("rng_state", "random_states")
_MAX_JSON = 100_000_000  # bytes, the limit of a safetensors header. An index of 50,000 tensors has 5 MB.
_PROGRESS = "trainer_state.json"
# Files that confirm the format for a folder with one file of weights, whose name alone would match unrelated folders.
_COMPANIONS = frozenset({"config.json", "adapter_config.json", "generation_config.json", _PROGRESS})


def _read_index(path: str) -> Snapshot:
    """Open the weights of an index. path: the index.

    Raises CheckpointError with the path of the index if a file is missing or outside the folder, or if a file contains
    other tensors than the index assigns to it.
    """
    folder = os.path.dirname(path)
    weight_map = _weight_map(path)
    whole = Assembly(folder, "")
    tensors_in: dict[str, dict[str, None]] = {}  # in the order of the index
    for tensor, name in weight_map.items():
        tensors_in.setdefault(name, {})[tensor] = None
    for name, listed in sorted(tensors_in.items()):
        file = os.path.join(folder, name)
        if not os.path.lexists(file):
            first = next(iter(listed))
            raise UnreadableFile(path, place=f"tensor '{first}'", found=f"the file {name} is missing", next_step=_AGAIN)
        part = read_file(file)
        for tensor in part.tensors:
            if weight_map.get(tensor) != name:
                other = weight_map.get(tensor)
                assignment = f"the index assigns it to {other}" if other else "the index does not list it"
                raise _malformed(path, tensor, f"it is in {name}, but {assignment}", "one file for each tensor")
        for tensor in sorted(listed.keys() - part.tensors.keys()):
            raise _malformed(path, tensor, f"it is not in {name}", f"{len(listed)} tensors in that file")
        whole.add(part)
    whole.bytes += os.stat(path).st_size
    # In the order of the index, which is the model's if the writer did not sort it.
    whole.tensors = {tensor: whole.tensors[tensor] for tensor in weight_map}
    return whole.snapshot()


def _read_json(path: str) -> dict[str, Any]:
    again = "it is cut short or damaged: save or copy it again"
    try:
        return parse_json_object(read_whole(path, _MAX_JSON, again), path, "", again)
    except OSError as error:  # a listed name can be a dangling link
        raise UnreadableFile.because(path, error) from None


def _weight_map(path: str) -> dict[str, str]:
    """Return the file of each tensor, after checking that all files are in the folder."""
    weight_map: Any = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise MalformedFile(
            path, place="weight_map", found=brief(weight_map), needed="a file name for each tensor", next_step=_AGAIN
        )
    for tensor, name in weight_map.items():
        if not name or "\0" in name or os.path.isabs(name) or ".." in re.split(r"[/\\]", name):
            raise _malformed(path, tensor, f"the file {brief(name)}", "a file in the folder of the index")
    return weight_map


def _malformed(path: str, tensor: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(path, place=f"tensor '{tensor}'", found=found, needed=needed, next_step=_AGAIN)


def has_weights(names: Iterable[str]) -> bool:
    """Whether a folder's files include weights, as one file with a known name or with an index."""
    return any(_WEIGHTS.fullmatch(name) or _INDEX.fullmatch(name) for name in names)


def matches_folder(folder: str) -> bool:
    """Whether a folder contains an index of weights, or weights with other files of the format.

    Trainer saves the weights on the first node only.
    """
    names = os.listdir(folder)
    if any(_INDEX.fullmatch(name) for name in names):
        return True
    beside = any(pattern.fullmatch(name) for pattern in _BESIDE for name in names)
    if _PROGRESS in names and beside:
        return True
    return has_weights(names) and (beside or not _COMPANIONS.isdisjoint(names))


def holds(relative: str) -> bool:
    """Whether a file belongs to this format. relative: its path below the folder."""
    patterns = (_WEIGHTS, _SHARD, _INDEX, *_BESIDE)
    return relative == _PROGRESS or any(pattern.fullmatch(relative) for pattern in patterns)


def read(folder: str, format_name: str = FORMAT) -> Snapshot:
    """Open the folder as one checkpoint: the model's tensors, `optimizer.*`, `scheduler.*`, ..., and the progress.

    Raises CheckpointError for an unreadable file.
    """
    names = sorted(os.listdir(folder))
    whole = Assembly(folder, format_name)
    in_model_order = _add_weights(whole, names)
    for pattern, top in _BESIDE.items():
        found = match_in_order(pattern, names)
        for match in found:
            # A single file of its kind gets no label, unless its number shows that files are missing: optimizer_1.bin
            # is the second optimizer's, but a single file of RNG states may belong to any rank.
            alone = len(found) == 1 and top not in _NUMBERED and (top in _OF_RANKS or not int(match[1] or 0))
            # Among several files, the one without a number is the first, except rng_state.pth of a single process.
            label = "" if alone else (match[1] or ("" if top == "rng_state" else "0"))
            whole.add(read_file(os.path.join(folder, match.string)), _add_prefix(top, label))
    if in_model_order:
        _name_parameters(whole)
    if _PROGRESS in names:
        state = _read_json(os.path.join(folder, _PROGRESS))
        progress = {key: state.get(key) for key in ("global_step", "epoch")}
        whole.values |= {key: value for key, value in progress.items() if isinstance(value, (int, float))}
    return whole.snapshot()


def _add_prefix(top: str, label: str) -> Callable[[str], str]:
    """Return a function that prefixes the names of a file.

    top: the prefix, which names may already have. label: distinguishes the file from others of its kind, or is empty.
    """
    start = f"{top}.{label}" if label else top

    def rename(name: str) -> str:
        inner = name.removeprefix(f"{top}.")
        return f"{start}.{inner}" if inner else start

    return rename


def _add_weights(whole: Assembly, names: list[str]) -> bool:
    """Add the weights of each model, and other files of weights below their file name.

    Returns whether the tensors are in the model's order; safetensors and indexes are sorted by name.
    """
    slots = _choose_weights(names)
    for slot, name in slots.items():
        path = os.path.join(whole.folder, name)
        part = _read_index(path) if _INDEX.fullmatch(name) else read_file(path)
        # Accelerate numbers additional models: model.safetensors, model_1.safetensors. A numbered model is not the
        # first, even if the first is missing.
        first = slot == next(iter(slots)) and not ((one := _WEIGHTS.fullmatch(name)) and one["number"])
        whole.add(part, str if first else _add_prefix(slot, ""))
    used = {os.path.relpath(path, whole.folder) for path in {tensor.path for tensor in whole.tensors.values()}}
    weights = {name for name in names if _WEIGHTS.fullmatch(name) or _SHARD.fullmatch(name)}
    copies = _list_second_copies(whole.folder, names, slots)
    for name in sorted(weights - used - set(slots.values())):
        # Another copy of the weights, or a shard that is not in the index: libraries may load it instead.
        whole.add(read_file(os.path.join(whole.folder, name)), _add_prefix(name, ""))
        sentence = Note.SECOND_WEIGHTS if name in copies else Note.OTHER_WEIGHTS
        whole.notes.append(sentence(file=name, others=", ".join(slots.values())))
    return [bool(_WEIGHTS.fullmatch(name)) and name.endswith(".bin") for name in slots.values()] == [True]


def _list_second_copies(folder: str, names: list[str], slots: dict[str, str]) -> set[str]:
    """Return the files of weights in another format, or of another variant, of a model that is read."""
    copies: set[str] = set()
    for name in names:
        slot = _find_slot(name)
        if slot in slots and slots[slot] != name:
            copies |= set(_weight_map(os.path.join(folder, name)).values()) if _INDEX.fullmatch(name) else {name}
    return copies


def _find_slot(name: str) -> str | None:
    """Return the model of a file of weights or of an index; None for another file."""
    if match := _INDEX.fullmatch(name):
        return match["stem"].removeprefix("pytorch_")
    if match := _WEIGHTS.fullmatch(name):
        return match["stem"].removeprefix("pytorch_") + (match["number"] or "")
    return None


def _name_parameters(whole: Assembly) -> None:
    """Use parameter names for the optimizer's states, if their order determines the names."""
    groups = {name.split(".")[2] for name in whole.values if name.startswith("optimizer.param_groups.")}
    found = match_by_order({name: tensor.shape for name, tensor in whole.tensors.items()}, len(groups))
    full = {name: found.get(name, name) for name in whole.tensors}
    whole.tensors = {full[name]: replace(tensor, name=full[name]) for name, tensor in whole.tensors.items()}


def _choose_weights(names: list[str]) -> dict[str, str]:
    """Choose the file or index of each model. If both formats are present, choose safetensors, as transformers does."""
    found: dict[str, tuple[int, int, str]] = {}
    for name in names:
        slot = _find_slot(name)
        if slot is None:
            continue
        index = _INDEX.fullmatch(name)
        is_bin = name.endswith(".bin") or (index is not None and index["ending"] == "bin")
        # A file precedes an index, as in transformers.PreTrainedModel.from_pretrained.
        rank = 2 * is_bin + (index is not None)
        # An index without a variant in its name precedes an index with a variant.
        chosen = rank, len(name), name
        found[slot] = min(found.get(slot, chosen), chosen)
    return {slot: name for slot, (_, _, name) in sorted(found.items(), key=lambda item: (item[0] != "model", item[0]))}
