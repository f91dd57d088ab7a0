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
from syncheck.readers.untrusted import are_strings, parse_json_object, read_whole
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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
    weight_map = _read_weight_map(path)
    tensors_by_file: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        tensors_by_file.setdefault(file, []).append(tensor)

    assembly = Assembly(folder, "")
    for file, tensors in sorted(tensors_by_file.items()):
        file_path = os.path.join(folder, file)
        if not os.path.lexists(file_path):
            raise UnreadableFile(
                path,
                place=f"tensor '{tensors[0]}'",
                found=f"the file {file} is missing",
                next_step=_AGAIN,
            )
        part = read_file(file_path)
        _check_assignment(path, file, part, weight_map)
        for tensor in sorted(set(tensors).difference(part.tensors)):
            raise _malformed(
                path,
                tensor,
                problem=f"it is not in {file}",
                needed=f"{len(tensors)} tensors in that file",
            )
        assembly.add(part)

    # The index is a part of the checkpoint, too.
    assembly.bytes += os.stat(path).st_size
    # In the order of the index, which is the model's if the writer did not sort it.
    assembly.tensors = {tensor: assembly.tensors[tensor] for tensor in weight_map}
    return assembly.snapshot()


def _check_assignment(path: str, file: str, part: Snapshot, weight_map: Mapping[str, str]) -> None:
    """Raise MalformedFile if a file contains a tensor that the index does not assign to it. path: of the index."""
    for tensor in part.tensors:
        assigned_file = weight_map.get(tensor)
        if assigned_file == file:
            continue
        assignment = f"the index assigns it to {assigned_file}" if assigned_file else "the index does not list it"
        raise _malformed(
            path,
            tensor,
            problem=f"it is in {file}, but {assignment}",
            needed="one file for each tensor",
        )


def _read_json(path: str) -> dict[str, Any]:
    again = "it is cut short or damaged: save or copy it again"
    try:
        return parse_json_object(read_whole(path, _MAX_JSON, again), path, "", again)
    except OSError as error:  # a listed name can be a dangling link
        raise UnreadableFile.because(path, error) from None


def _read_weight_map(path: str) -> dict[str, str]:
    """Return the file of each tensor, after checking that all files are in the folder."""
    weight_map: Any = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not are_strings(list(weight_map.values())):
        raise MalformedFile(
            path,
            place="weight_map",
            found=brief(weight_map),
            needed="a file name for each tensor",
            next_step=_AGAIN,
        )

    for tensor, file in weight_map.items():
        if not _is_below(file):
            raise _malformed(
                path,
                tensor,
                problem=f"the file {brief(file)}",
                needed="a file in the folder of the index",
            )
    return weight_map


def _is_below(file: str) -> bool:
    """Whether an untrusted path stays within the folder."""
    if not file or "\0" in file or os.path.isabs(file):
        return False
    return ".." not in re.split(r"[/\\]", file)


def _malformed(path: str, tensor: str, *, problem: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=f"tensor '{tensor}'",
        found=problem,
        needed=needed,
        next_step=_AGAIN,
    )


def has_weights(names: Iterable[str]) -> bool:
    """Whether a folder's files include weights, as one file with a known name or with an index."""
    return any(_matches_any((_WEIGHTS, _INDEX), name) for name in names)


def matches_folder(folder: str) -> bool:
    """Whether a folder contains an index of weights, or weights with other files of the format.

    Trainer saves the weights on the first node only.
    """
    names = os.listdir(folder)
    if any(_INDEX.fullmatch(name) for name in names):
        return True

    has_other_states = any(_matches_any(_BESIDE, name) for name in names)
    if has_other_states and _PROGRESS in names:
        return True

    has_companion = has_other_states or not _COMPANIONS.isdisjoint(names)
    return has_companion and has_weights(names)


def _matches_any(patterns: Iterable[re.Pattern[str]], name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in patterns)


def holds(relative: str) -> bool:
    """Whether a file belongs to this format. relative: its path below the folder."""
    return relative == _PROGRESS or _matches_any((_WEIGHTS, _SHARD, _INDEX, *_BESIDE), relative)


def read(folder: str, format_name: str = FORMAT) -> Snapshot:
    """Open the folder as one checkpoint: the model's tensors, `optimizer.*`, `scheduler.*`, ..., and the progress.

    Raises CheckpointError for an unreadable file.
    """
    names = sorted(os.listdir(folder))
    assembly = Assembly(folder, format_name)
    in_model_order = _add_weights(assembly, names)
    for pattern, prefix in _BESIDE.items():
        matches = match_in_order(pattern, names)
        for match in matches:
            label = _choose_label(prefix, match[1] or "", is_single=len(matches) == 1)
            part = read_file(os.path.join(folder, match.string))
            assembly.add(part, _make_rename(prefix, label))

    # Only then does the order of the parameters show the ids of the optimizer.
    if in_model_order:
        _name_parameters(assembly)
    if _PROGRESS in names:
        state = _read_json(os.path.join(folder, _PROGRESS))
        progress = {key: state.get(key) for key in ("global_step", "epoch")}
        assembly.values |= {key: value for key, value in progress.items() if isinstance(value, (int, float))}
    return assembly.snapshot()


def _choose_label(prefix: str, number: str, *, is_single: bool) -> str:
    """Return the label that distinguishes a file from others of its kind, or an empty text.

    prefix: of the names of its kind.
    number: in the name of the file, or empty.
    """
    if is_single and prefix not in _NUMBERED:
        # A number shows that files are missing: optimizer_1.bin is the second optimizer's. But a single file of RNG
        # states may belong to any rank.
        is_first = not int(number or 0)
        if is_first or prefix in _OF_RANKS:
            return ""
    if number or prefix == "rng_state":
        # Empty for rng_state.pth, which belongs to a single process.
        return number
    # Among several files, the one without a number is the first.
    return "0"


def _make_rename(prefix: str, label: str = "") -> Callable[[str], str]:
    """Return a function that prefixes the names of a file.

    prefix: which names may already have.
    label: distinguishes the file from others of its kind, or is empty.
    """
    start = f"{prefix}.{label}" if label else prefix

    def rename(name: str) -> str:
        inner = name.removeprefix(f"{prefix}.")
        return f"{start}.{inner}" if inner else start

    return rename


def _add_weights(assembly: Assembly, names: list[str]) -> bool:
    """Add the weights of each model, and other files of weights below their file name.

    Returns whether the tensors are in the model's order; safetensors and indexes are sorted by name.
    """
    chosen_files = _choose_weights(names)
    for model, name in chosen_files.items():
        part = _read_weights(os.path.join(assembly.folder, name))
        is_first = model == next(iter(chosen_files)) and not _is_numbered(name)
        rename = str if is_first else _make_rename(model)
        assembly.add(part, rename)

    _add_further_weights(assembly, names, chosen_files)
    if len(chosen_files) != 1:
        return False

    (name,) = chosen_files.values()
    return _WEIGHTS.fullmatch(name) is not None and name.endswith(".bin")


def _read_weights(path: str) -> Snapshot:
    """Open a file of weights or an index."""
    if _INDEX.fullmatch(os.path.basename(path)):
        return _read_index(path)
    return read_file(path)


def _is_numbered(name: str) -> bool:
    """Whether a file of weights has a number.

    Accelerate numbers additional models: model.safetensors, model_1.safetensors. A numbered model is not the first,
    even if the first is missing.
    """
    match = _WEIGHTS.fullmatch(name)
    return match is not None and match["number"] is not None


def _add_further_weights(assembly: Assembly, names: list[str], chosen_files: dict[str, str]) -> None:
    """Add further copies of the weights, which libraries may load instead, and shards with tensors of their own."""
    loaded_names = frozenset(assembly.tensors)
    paths = {tensor.path for tensor in assembly.tensors.values()}
    read_names = {os.path.relpath(path, assembly.folder) for path in paths}
    read_names.update(chosen_files.values())
    weights = {name for name in names if _matches_any((_WEIGHTS, _SHARD), name)}
    copies = _list_second_copies(assembly.folder, names, chosen_files)
    stray_names = set(filter(_SHARD.fullmatch, weights)) - copies
    for name in sorted(weights - read_names):
        part = read_file(os.path.join(assembly.folder, name))
        others = ", ".join(chosen_files.values())
        # Libraries load the file or the index, which has all of the tensors: the shard is left from an earlier save.
        has_loaded_names = loaded_names.issuperset(part.tensors)
        if has_loaded_names and name in stray_names:
            assembly.notes.append(Note.STRAY_SHARD(file=name, others=others))
            continue
        assembly.add(part, _make_rename(name))
        sentence = Note.SECOND_WEIGHTS if name in copies else Note.OTHER_WEIGHTS
        assembly.notes.append(sentence(file=name, others=others))


def _list_second_copies(folder: str, names: list[str], chosen_files: dict[str, str]) -> set[str]:
    """Return the files of weights in another format, or of another variant, of a model that is read."""
    copies: set[str] = set()
    for name in names:
        model = _find_model(name)
        if model not in chosen_files or chosen_files[model] == name:
            continue
        if _INDEX.fullmatch(name):
            copies.update(_read_weight_map(os.path.join(folder, name)).values())
        else:
            copies.add(name)
    return copies


def _find_model(name: str) -> str | None:
    """Return the model of a file of weights or of an index; None for another file."""
    index = _INDEX.fullmatch(name)
    if index is not None:
        return index["stem"].removeprefix("pytorch_")

    weights = _WEIGHTS.fullmatch(name)
    if weights is not None:
        return weights["stem"].removeprefix("pytorch_") + (weights["number"] or "")
    return None


def _name_parameters(assembly: Assembly) -> None:
    """Use parameter names for the optimizer's states, if their order determines the names."""
    groups = {name.split(".")[2] for name in assembly.values if name.startswith("optimizer.param_groups.")}
    shapes = {name: tensor.shape for name, tensor in assembly.tensors.items()}
    new_names = match_by_order(shapes, len(groups))
    tensors = {}
    for name, tensor in assembly.tensors.items():
        new_name = new_names.get(name, name)
        tensors[new_name] = replace(tensor, name=new_name)
    assembly.tensors = tensors


def _choose_weights(names: list[str]) -> dict[str, str]:
    """Choose the file or index of each model. If both formats are present, choose safetensors, as transformers does."""
    candidates: dict[str, list[str]] = {}
    for name in names:
        model = _find_model(name)
        if model is not None:
            candidates.setdefault(model, []).append(name)
    return {model: min(candidates[model], key=_preference) for model in sorted(candidates, key=_model_order)}


def _preference(name: str) -> tuple[bool, bool, int, str]:
    """Return the sort key of a file of weights or an index among those of the same model."""
    index = _INDEX.fullmatch(name)
    is_index = index is not None
    is_bin = name.endswith(".bin")
    if index is not None:
        is_bin = index["ending"] == "bin"
    # A file precedes an index, as in transformers.PreTrainedModel.from_pretrained. An index without a variant in its
    # name precedes an index with a variant.
    return is_bin, is_index, len(name), name


def _model_order(model: str) -> tuple[bool, str]:
    return model != "model", model
