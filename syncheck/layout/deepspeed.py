"""Whole tensors of DeepSpeed tag folders, from the partitions of ZeRO 1, 2 and 3.

The layout is that of deepspeed/utils/zero_to_fp32.py. `param_shapes` contains the names and shapes of the trained
parameters by group. In ZeRO 1 and 2, a group is one flat tensor of all its parameters, and each rank stores a range of
it. In ZeRO 3, each parameter has one chunk per rank, and each rank stores a flat tensor of its chunks.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.layout.boxes import combine, cut_flat_tensor
from syncheck.messages import Note
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, are_naturals
from syncheck.tensors.value_kinds import is_membership
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from syncheck.snapshots import Shard, Snapshot, Tensor

    Groups = Mapping[str, Mapping[str, tuple[int, ...]]]  # shapes by group and parameter

# Limit of the parts of all tensors together; ten thousand tensors on a hundred ranks.
_MOST_SHARDS = 1 << 20
_LABEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00")
_COUNT = re.compile(rf"optimizer\.{_LABEL.pattern}\.partition_count(\.\d+)?")
_FLAT = re.compile(r"(?:single_partition_of_fp32_groups|fp32_flat_groups)\.(\d+)")
# State of a flat tensor. The reader names it by number or, if the shapes in the file match, after the flat tensor.
_STATE = re.compile(r"(?:base_optimizer_state\.|optimizer_state_dict\.\w+\.)?(\d+)\.(\w+)")
_FROZEN = "frozen_param_fragments."
# Values that describe the partitions and not the model.
_LAYOUT = re.compile(r"(?:(?:frozen_)?param_(?:shapes|fragments)|shared_params|buffer_names)(?:\.|$)|optimizer$")


@dataclass(frozen=True, slots=True)
class _Contents:
    """The tensors of a folder. model: of rank 0. flats: by group and rank. states: by group and rank, by name."""

    model: dict[str, Tensor] = field(default_factory=dict)
    flats: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    states: dict[tuple[str, int], dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    rest: dict[str, Tensor] = field(default_factory=dict)


def join(snapshot: Snapshot) -> Snapshot:
    """Return a tag folder with whole tensors, named after the parameters.

    The model is the optimizer's weights (fp32), the frozen parameters and the buffers. The copies of the trained
    parameters in the model states (bf16, fp16 or fp32) are omitted, and a note counts them. In ZeRO 3, rank 0
    determines the buffers, as in zero_to_fp32.py. Optimizer state is `optimizer.<parameter>.<state>`.

    Folders without ZeRO partitions, with model parallelism or with groups of different numbers of partitions (experts)
    are returned unchanged. Raises MalformedFile if a partition is missing, or has another size than its parameters.
    """
    path, values = snapshot.path, snapshot.values
    ranks = {label: int(match[1]) for label in snapshot.shard_labels if (match := _LABEL.fullmatch(label))}
    counts = [value for name, value in values.items() if _COUNT.fullmatch(name)]
    if not ranks or len(ranks) < len(snapshot.shard_labels) or any(count != counts[0] for count in counts):
        return snapshot
    if sorted(ranks.values()) != [*range(len(ranks))] or counts[:1] not in ([], [len(ranks)]):
        found, needed = f"ranks {brief(sorted(ranks.values()))}", f"{brief(counts[0])} ranks" if counts else "all ranks"
        raise _malformed(path, "ZeRO partitions", found, needed)
    contents = _sort_tensors(snapshot, ranks)
    first = min(ranks, key=ranks.__getitem__)
    # In ZeRO 3, each rank has a file of model states.
    zero3 = any(name.startswith(f"{first}.") for name in snapshot.tensors)
    top = f"{first}." if zero3 else ""
    groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, sizes in _read_sizes(snapshot, f"{top}param_shapes.").items():
        group, _, parameter = name.partition(".")
        groups[group][parameter] = _check_shape(path, parameter, sizes)
    for name, sizes in _read_sizes(snapshot, f"{top}frozen_param_shapes.").items() if zero3 else ():
        groups[_FROZEN + name] = {name: _check_shape(path, name, sizes)}
    paddings = None if zero3 else _read_sizes(snapshot, f"optimizer.{first}.param_alignment_paddings.")
    whole = _join_groups(path, contents, groups, paddings, len(ranks))
    for name, value in values.items():
        tied = name.removeprefix(f"{top}shared_params.")
        if tied != name and isinstance(value, str) and value in whole:
            whole[tied] = whole[value]
    copies = sum(name in whole and tensor.numel > 0 for name, tensor in contents.model.items())
    tensors = contents.model | whole | contents.rest
    return replace(
        snapshot, tensors={name: replace(tensor, name=name) for name, tensor in tensors.items()},
        values=_join_values(values, ranks), shard_labels=frozenset(),
        notes=(*snapshot.notes, *([Note.WEIGHT_COPIES(count=copies)] if copies else [])),
    )  # fmt: skip


def _malformed(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(
        path,
        place=place,
        found=found,
        needed=needed,
        next_step="copy the files of all ranks into one folder, or save again",
    )


def _sort_tensors(snapshot: Snapshot, ranks: Mapping[str, int]) -> _Contents:
    """Sort the tensors of a folder. ranks: by label."""
    contents = _Contents()
    for name, tensor in snapshot.tensors.items():
        of_optimizer = name.startswith("optimizer.")
        label, _, inner = name.removeprefix("optimizer.").partition(".")
        rank = ranks.get(label)
        if rank is None and not of_optimizer:
            # ZeRO 2 also stores the frozen parameters of the model as fragments.
            contents.model.setdefault(name.removeprefix(_FROZEN), tensor)
        elif rank is None:
            contents.rest[name] = tensor
        elif not of_optimizer and inner.startswith(_FROZEN):
            contents.flats[inner][rank] = tensor
        elif not of_optimizer and rank == 0:
            contents.model[inner] = tensor
        elif of_optimizer and (match := _FLAT.fullmatch(inner)):
            contents.flats[match[1]][rank] = tensor
        elif of_optimizer and (match := _STATE.fullmatch(inner)):
            contents.states[match[1], rank][match[2]] = tensor
        elif of_optimizer or inner not in contents.model:
            contents.rest[name] = tensor
    return contents


def _read_sizes(snapshot: Snapshot, start: str) -> dict[str, list[int]]:
    """Return the lists of sizes below a name. Raises MalformedFile for other values."""
    lists: dict[str, list[int]] = {}
    for name, value in snapshot.values.items():
        if name.startswith(start) and value == "()":
            lists[name.removeprefix(start)] = []
        elif name.startswith(start) and are_naturals([value]):
            lists.setdefault(name.removeprefix(start).rpartition(".")[0], []).append(value)
        elif name.startswith(start):
            raise _malformed(snapshot.path, name, brief(value), "a size")
    return lists


def _check_shape(path: str, name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) > MOST_DIMENSIONS or math.prod(sizes) > MOST_ELEMENTS:
        raise _malformed(path, f"shape of {brief(name)}", brief(sizes), "the shape of a tensor")
    return tuple(sizes)


def _join_groups(
    path: str, contents: _Contents, groups: Groups, paddings: Mapping[str, Sequence[int]] | None, ranks: int
) -> dict[str, Tensor]:
    """Return the whole weights and optimizer states. paddings: after each parameter, by group; None for ZeRO 3."""
    stored = {group for group, flats in contents.flats.items() if any(flat.numel for flat in flats.values())}
    shapes = {name: shape for members in groups.values() for name, shape in members.items()}
    if not stored <= groups.keys() or len(shapes) < sum(map(len, groups.values())):
        found = f"{len(shapes)} parameters in groups {brief(sorted(groups))}"
        raise _malformed(path, "param_shapes", found, f"each parameter once, in groups {brief(sorted(stored))}")
    boxes: dict[tuple[str, str], list[Shard]] = defaultdict(list)
    whole: dict[str, Tensor] = {}
    left = _MOST_SHARDS
    for group, members in groups.items():
        flats = [flat for _, flat in sorted(contents.flats[group].items()) if _is_flat(flat)]
        if len(flats) < ranks:
            raise _malformed(path, f"group {brief(group)}", f"flat tensors of {len(flats)} ranks", f"{ranks} ranks")
        sizes = {name: math.prod(shape) for name, shape in members.items()}
        gaps = None if paddings is None else paddings.get(group) or [0] * len(sizes)
        for name, rank, at, start, count in _split(path, group, sizes, [flat.numel for flat in flats], gaps):
            for key, tensor in {"": flats[rank], **contents.states[group, rank]}.items():
                if _is_flat(tensor) and tensor.numel >= flats[rank].numel:
                    boxes[name, key] += cut_flat_tensor(tensor, at, members[name], start, count)
                elif tensor.shape:  # not by element, like the scales of 8-bit optimizers
                    whole[tensor.name] = tensor
                elif count:  # the step of the group
                    whole.setdefault(f"optimizer.{name}.{key}", tensor)
                left -= 1
            if left < 0:
                raise _malformed(path, "partitions", f"more than {_MOST_SHARDS} parts of tensors", "a readable layout")
    for (name, key), shards in boxes.items():
        full = f"optimizer.{name}.{key}" if key else name
        dtypes = sorted({shard.tensor.dtype for shard in shards}) or ["float32"]
        if len(dtypes) > 1:
            raise _malformed(path, f"tensor {brief(full)}", f"parts of dtype {' and '.join(dtypes)}", "one dtype")
        whole[full] = combine(full, dtypes[0], shapes[name], shards, path)
    return whole


def _is_flat(tensor: Tensor) -> bool:
    stored = tensor.data is None and tensor.digest is None and not tensor.shards
    return tensor.strides == (1,) and stored and not tensor.refused and not tensor.lazy


def _split(
    path: str, group: str, sizes: Mapping[str, int], lengths: Sequence[int], gaps: Sequence[int] | None
) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield the parts of each parameter: name, rank, position in the rank's flat tensor, first element and count.

    sizes: elements of the parameters. lengths: of the flat tensors. gaps: padding after each parameter; None for
    ZeRO 3. Raises MalformedFile for flat tensors of other lengths. In ZeRO 1 and 2, the last rank may have padding to a
    multiple of twice the number of ranks.
    """
    ranks, total = len(lengths), sum(lengths)
    chunks = [-(-size // ranks) for size in sizes.values()]
    needed = ranks * sum(chunks) if gaps is None else sum(sizes.values()) + sum(gaps)
    fits = len(set(lengths)) == 1 if gaps is None else len(gaps) == len(sizes)
    if not fits or not needed <= total < needed + (1 if gaps is None else 2 * ranks):
        found = f"{brief(lengths)} elements in flat tensors"
        raise _malformed(path, f"group {brief(group)}", found, f"{needed} for the shapes of its parameters")
    begins = [*itertools.accumulate(lengths, initial=0)]
    at = 0
    for (name, size), chunk, gap in zip(sizes.items(), chunks, gaps or [0] * len(sizes), strict=True):
        if gaps is None:
            for rank in range(ranks):
                start = min(rank * chunk, size)
                yield name, rank, at, start, min(chunk, size - start)
            at += chunk
            continue
        rank, start = bisect_right(begins, at) - 1, 0
        while start < size:
            first = at + start - begins[rank]
            count = min(size - start, lengths[rank] - first)
            yield name, rank, first, start, count
            rank, start = rank + 1, start + count
        at += size + gap


def _join_values(values: Mapping[str, Any], labels: Container[str]) -> dict[str, Any]:
    """Return the values without the layout. A value that is equal on all ranks has no label.

    For the optimizer, only its settings, its states and the loss scaler remain.
    """
    joined: dict[str, Any] = {}
    for name, value in values.items():
        container = "optimizer." if name.startswith("optimizer.") else ""
        label, _, inner = name.removeprefix(container).partition(".")
        plain = container + inner if label in labels else name
        if container and label in labels and not inner.startswith(("param_groups.", "loss_scaler.")):
            state = _STATE.fullmatch(inner)
            plain = f"optimizer.{state[1]}.{state[2]}" if state else ""
        if plain and not _LAYOUT.match(plain) and not is_membership(plain):
            joined[plain if joined.setdefault(plain, value) == value else name] = value
    return joined
