"""Whole tensors of DeepSpeed tag folders, from the partitions of ZeRO 1, 2 and 3.

The order of the partitions is that of deepspeed/utils/zero_to_fp32.py. `param_shapes` lists the names and shapes of the
trained parameters by group. In ZeRO 1 and 2, a group is one flat tensor of all its parameters, and each rank holds a
range of it. In ZeRO 3, each parameter has one chunk per rank, and each rank holds a flat tensor of its chunks.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.comparison.values import is_membership
from syncheck.errors import MalformedFile, brief
from syncheck.logical.boxes import combine, flat_boxes
from syncheck.messages import Note
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, are_naturals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from syncheck.snapshots import Shard, Snapshot, Tensor

# Limit of the parts of all tensors together; ten thousand tensors on a hundred ranks.
_MOST_PARTS = 1 << 20
_LABEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00")
_COUNT = re.compile(rf"optimizer\.{_LABEL.pattern}\.partition_count(\.\d+)?")
_FLAT = re.compile(r"(?:single_partition_of_fp32_groups|fp32_flat_groups)\.(\d+)")
# State of a flat tensor. The reader names it by number or, if the shapes in the file match, after the flat tensor.
_STATE = re.compile(r"(?:base_optimizer_state\.|optimizer_state_dict\.\w+\.)?(\d+)\.(\w+)")
_FROZEN = "frozen_param_fragments."
# Values that describe the partitions and not the model.
_LAYOUT = re.compile(r"(?:param_shapes|frozen_param_shapes|shared_params|buffer_names)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensors of a rank.

    model: by name; in ZeRO 1 and 2, rank 0 has the model of all ranks. flats: by group, and the chunks of frozen
    parameters by name. states: of the optimizer, by group.
    """

    model: dict[str, Tensor] = field(default_factory=dict)
    flats: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))


def join(snapshot: Snapshot) -> Snapshot:
    """Return a tag folder with whole tensors, named after the parameters.

    The model is the optimizer's weights (fp32), the frozen parameters and the buffers. The copies of the trained
    parameters in the model states (bf16, fp16 or fp32) are omitted, and a note counts them. In ZeRO 3, the buffers are
    those of rank 0, as in zero_to_fp32.py. Optimizer state is `optimizer.<parameter>.<state>`.

    Folders without ZeRO partitions, with model parallelism or with experts are returned unchanged. Raises MalformedFile
    if a partition is missing, or if the partitions do not have the size of the parameters.
    """
    labels = {int(match[1]): label for label in snapshot.shard_labels if (match := _LABEL.fullmatch(label))}
    counts = [value for name, value in snapshot.values.items() if _COUNT.fullmatch(name)]
    if not labels or len(labels) < len(snapshot.shard_labels) or any(count != counts[0] for count in counts):
        return snapshot
    if sorted(labels) != [*range(len(labels))] or counts[:1] not in ([], [len(labels)]):
        found = f"{len(labels)} of {brief(counts[0]) if counts else max(labels) + 1}"
        raise _malformed(snapshot.path, "ZeRO partitions", found, "the partitions of all ranks")
    parts, rest = _sort_tensors(snapshot, {labels[rank]: rank for rank in labels})
    # In ZeRO 3, each rank has a file of model states.
    zero3 = any(name.startswith(f"{labels[0]}.") for name in snapshot.tensors)
    top = f"{labels[0]}." if zero3 else ""
    groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, sizes in _read_sizes(snapshot, f"{top}param_shapes.").items():
        group, _, parameter = name.partition(".")
        groups[group][parameter] = _check_shape(snapshot.path, parameter, sizes)
    for name, sizes in _read_sizes(snapshot, f"{top}frozen_param_shapes.").items() if zero3 else ():
        groups[_FROZEN + name] = {name: _check_shape(snapshot.path, name, sizes)}
    paddings = _read_sizes(snapshot, f"optimizer.{labels[0]}.param_alignment_paddings.")
    whole = _join_groups(snapshot.path, parts, groups, None if zero3 else paddings)
    for name, value in snapshot.values.items():
        if name.startswith(f"{top}shared_params.") and isinstance(value, str) and value in whole:
            tied = name.removeprefix(f"{top}shared_params.")
            whole[tied] = replace(whole[value], name=tied)
    model = parts[0].model
    for rank, part in enumerate(parts):
        rest |= {f"{labels[rank]}.{name}": tensor for name, tensor in part.model.items() if name not in model}
    copies = sum(name in whole and tensor.numel > 0 for name, tensor in model.items())
    return replace(
        snapshot, tensors={name: replace(tensor, name=name) for name, tensor in (model | whole | rest).items()},
        values=_join_values(snapshot.values, labels.values()), shard_labels=frozenset(),
        notes=(*snapshot.notes, *([Note.WEIGHT_COPIES(count=copies)] if copies else [])),
    )  # fmt: skip


def _malformed(path: str, place: str, found: str, needed: str) -> MalformedFile:
    return MalformedFile(path, place=place, found=found, needed=needed, next_step="save or copy the whole folder again")


def _sort_tensors(snapshot: Snapshot, ranks: Mapping[str, int]) -> tuple[list[_Part], dict[str, Tensor]]:
    """Return the tensors of each rank, and other optimizer state by name. ranks: by label."""
    parts = [_Part() for _ in ranks]
    rest = {}
    for name, tensor in snapshot.tensors.items():
        label, _, inner = name.removeprefix("optimizer.").partition(".")
        part = parts[ranks.get(label, 0)]
        if label not in ranks and not name.startswith("optimizer."):
            # ZeRO 2 also stores the frozen parameters of the model as fragments.
            part.model.setdefault(name.removeprefix(_FROZEN), tensor)
        elif not name.startswith("optimizer."):
            (part.flats if inner.startswith(_FROZEN) else part.model)[inner] = tensor
        elif label in ranks and (match := _FLAT.fullmatch(inner)):
            part.flats[match[1]] = tensor
        elif label in ranks and (match := _STATE.fullmatch(inner)):
            part.states[match[1]][match[2]] = tensor
        else:
            rest[name] = tensor
    return parts, rest


def _read_sizes(snapshot: Snapshot, start: str) -> dict[str, list[int]]:
    """Return the lists of sizes below a name. Raises MalformedFile for other values."""
    lists: dict[str, list[int]] = {}
    for name, value in snapshot.values.items():
        if not name.startswith(start):
            continue
        if value == "()":
            lists[name.removeprefix(start)] = []
        elif are_naturals([value]):
            lists.setdefault(name.removeprefix(start).rpartition(".")[0], []).append(value)
        else:
            raise _malformed(snapshot.path, name, brief(value), "a size")
    return lists


def _check_shape(path: str, name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) > MOST_DIMENSIONS or math.prod(sizes) > MOST_ELEMENTS:
        raise _malformed(path, f"shape of {brief(name)}", brief(sizes), "the shape of a tensor")
    return tuple(sizes)


def _join_groups(
    path: str,
    parts: Sequence[_Part],
    groups: Mapping[str, Mapping[str, tuple[int, ...]]],
    paddings: Mapping[str, Sequence[int]] | None,
) -> dict[str, Tensor]:
    """Return the whole weights and optimizer states.

    groups: shapes by group and parameter. paddings: after the parameters of each group; None for ZeRO 3.
    """
    held = {group for part in parts for group, flat in part.flats.items() if flat.numel}
    shapes = {name: shape for members in groups.values() for name, shape in members.items()}
    if not held <= groups.keys() or len(shapes) < sum(map(len, groups.values())):
        found = f"{len(shapes)} parameters in groups {brief(sorted(groups))}"
        raise _malformed(path, "param_shapes", found, f"each parameter once, in groups {brief(sorted(held))}")
    boxes: dict[tuple[str, str], list[Shard]] = defaultdict(list)
    whole: dict[str, Tensor] = {}
    left = _MOST_PARTS
    for group, members in groups.items():
        flats = [flat for part in parts if (flat := part.flats.get(group)) and _is_flat(flat)]
        if len(flats) < len(parts):
            found = f"flat tensors of {len(flats)} ranks"
            raise _malformed(path, f"group {brief(group)}", found, f"{len(parts)} ranks")
        sizes = {name: math.prod(shape) for name, shape in members.items()}
        gaps = None if paddings is None else paddings.get(group) or [0] * len(sizes)
        for name, rank, at, start, count in _split(path, group, sizes, [flat.numel for flat in flats], gaps):
            for key, tensor in {"": flats[rank], **parts[rank].states[group]}.items():
                if _is_flat(tensor) and tensor.numel >= flats[rank].numel:
                    boxes[name, key] += flat_boxes(tensor, at, members[name], start, count)
                elif tensor.shape:  # not by element, such as the scales of 8-bit optimizers
                    whole[tensor.name] = tensor
                elif count:  # the step of the group
                    whole.setdefault(f"optimizer.{name}.{key}", tensor)
                left -= 1
            if left < 0:
                raise _malformed(path, "partitions", f"more than {_MOST_PARTS} parts of tensors", "a readable layout")
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
    """Yield the parts of each parameter: name, rank, position in the rank's partition, first element and count.

    sizes: elements of the parameters. lengths: of the partitions of a group. gaps: padding after each parameter; None
    for ZeRO 3. Raises MalformedFile for partitions of another size. The last one may have additional padding to a
    multiple of twice the number of ranks.
    """
    ranks = len(lengths)
    chunks = [-(-size // ranks) for size in sizes.values()]
    needed = sum(chunks) * ranks if gaps is None else sum(sizes.values()) + sum(gaps)
    if gaps is None:
        fits = all(length * ranks == needed for length in lengths)
    else:
        fits = len(gaps) == len(sizes) and needed <= sum(lengths) < needed + 2 * ranks
    if not fits:
        found = f"partitions of {brief([*lengths])} elements"
        raise _malformed(path, f"group {brief(group)}", found, f"{needed} together, for its parameters")
    begins = [*itertools.accumulate(lengths, initial=0)]
    at = 0
    for name, size, chunk, gap in zip(sizes, sizes.values(), chunks, gaps or [0] * len(sizes), strict=True):
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


def _join_values(values: Mapping[str, Any], labels: Collection[str]) -> dict[str, Any]:
    """Return the values without layout. A value that is equal in the files of all ranks has no label.

    Of the optimizer's values, only settings, states and the loss scaler describe the model.
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
