"""Whole tensors of DeepSpeed tag folders, from the partitions of ZeRO 1, 2 and 3.

The layout is that of deepspeed/utils/zero_to_fp32.py. `param_shapes` contains the names and shapes of the trained
parameters by group. In ZeRO 1 and 2, a group is one flat tensor of all its parameters, and each rank stores a range of
it. In ZeRO 3, each parameter has one chunk per rank, and each rank stores a flat tensor of its chunks.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.frozen import record
from syncheck.layout.boxes import combine, cut_flat_tensor, is_in_file
from syncheck.layout.zero_chunks import malformed_folder, split_group, split_parameters
from syncheck.messages import Note
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, are_naturals
from syncheck.tensors.value_kinds import is_membership
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from syncheck.layout.zero_chunks import Chunk
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
# Values that describe the partitions and not the model. Such values of the optimizer have an empty name.
_LAYOUT = re.compile(r"(?:(?:frozen_)?param_(?:shapes|fragments)|shared_params|buffer_names)(?:\.|$)|optimizer$|\Z")


class _State(NamedTuple):
    """The key of the optimizer state of a flat tensor."""

    group: str
    rank: int


@record
class _Contents:
    """The tensors of a folder."""

    model: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of rank 0, by name."""
    flats: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    """Flat tensors of weights, by group and rank."""
    states: dict[_State, dict[str, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    """The tensors of states by name, by group and rank."""
    unjoined: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that are not joined."""


def join(snapshot: Snapshot) -> Snapshot:
    """Return a tag folder with whole tensors, named after the parameters.

    The model is the optimizer's weights (fp32), the frozen parameters and the buffers. The copies of the trained
    parameters in the model states (bf16, fp16 or fp32) are omitted, and a note counts them. In ZeRO 3, rank 0
    determines the buffers, as in zero_to_fp32.py. Optimizer state is `optimizer.<parameter>.<state>`.

    Folders without ZeRO partitions, with model parallelism or with groups of different numbers of partitions (experts)
    are returned unchanged. Raises MalformedFile if a partition is missing, or has another size than its parameters.
    """
    ranks = _find_ranks(snapshot)
    if not ranks:
        return snapshot

    contents = _sort_tensors(snapshot, ranks)
    first_label = min(ranks, key=ranks.__getitem__)
    top = ""
    paddings: dict[str, list[int]] | None = None
    # In ZeRO 3, each rank has a file of model states.
    is_zero3 = any(name.startswith(f"{first_label}.") for name in snapshot.tensors)
    if is_zero3:
        top = f"{first_label}."
    else:
        paddings = _read_sizes(snapshot, f"optimizer.{first_label}.param_alignment_paddings.")

    groups = _read_groups(snapshot, top, with_frozen=is_zero3)

    # The fp32 weights of the optimizer are more exact than their copies in the model states.
    whole_tensors = _join_groups(
        snapshot.path,
        contents,
        groups,
        paddings=paddings,
        ranks=len(ranks),
    )
    tied_start = f"{top}shared_params."
    for name, value in snapshot.values.items():
        # A tied parameter has no weights of its own in the optimizer.
        if name.startswith(tied_start) and value in whole_tensors:
            tied_name = name.removeprefix(tied_start)
            whole_tensors[tied_name] = whole_tensors[value]

    notes = snapshot.notes
    copies = sum(name in whole_tensors and tensor.numel > 0 for name, tensor in contents.model.items())
    if copies:
        notes = (*notes, Note.WEIGHT_COPIES(count=copies))

    tensors = contents.model | whole_tensors | contents.unjoined
    return replace(
        snapshot,
        tensors={name: replace(tensor, name=name) for name, tensor in tensors.items()},
        values=_join_values(snapshot.values, ranks),
        shard_labels=frozenset(),
        notes=notes,
    )


def _find_ranks(snapshot: Snapshot) -> dict[str, int]:
    """Return the ranks by label; empty for folders in another layout. Raises MalformedFile if a rank is missing."""
    ranks: dict[str, int] = {}
    for label in snapshot.shard_labels:
        match = _LABEL.fullmatch(label)
        if match is None:
            return {}

        ranks[label] = int(match[1])

    counts = {value for name, value in snapshot.values.items() if _COUNT.fullmatch(name)}
    # Groups of experts have other numbers of partitions.
    if not ranks or len(counts) > 1:
        return {}

    numbers = sorted(ranks.values())
    if numbers == [*range(len(ranks))] and counts <= {len(ranks)}:
        return ranks

    needed = f"{brief(counts.pop())} ranks" if counts else "all ranks"
    raise malformed_folder(
        snapshot.path,
        place="ZeRO partitions",
        found=f"ranks {brief(numbers)}",
        needed=needed,
    )


def _read_groups(snapshot: Snapshot, top: str, *, with_frozen: bool) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes of parameters by group and name.

    top: start of the names of values.
    with_frozen: also return frozen parameters, which have a group each.
    """
    path = snapshot.path
    groups: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, sizes in _read_sizes(snapshot, f"{top}param_shapes.").items():
        group, _, parameter = name.partition(".")
        groups[group][parameter] = _check_shape(path, parameter, sizes)

    if with_frozen:
        for name, sizes in _read_sizes(snapshot, f"{top}frozen_param_shapes.").items():
            groups[_FROZEN + name] = {name: _check_shape(path, name, sizes)}

    return groups


def _sort_tensors(snapshot: Snapshot, ranks: Mapping[str, int]) -> _Contents:
    """Sort the tensors of a folder. ranks: by label."""
    contents = _Contents()
    for name, tensor in snapshot.tensors.items():
        of_optimizer = name.startswith("optimizer.")
        label, _, inner_name = name.removeprefix("optimizer.").partition(".")
        rank = ranks.get(label)
        if of_optimizer:
            _sort_optimizer_tensor(contents, name, rank, tensor)
        elif rank is None:
            # ZeRO 2 also stores the frozen parameters of the model as fragments.
            contents.model.setdefault(name.removeprefix(_FROZEN), tensor)
        elif inner_name.startswith(_FROZEN):
            contents.flats[inner_name][rank] = tensor
        elif rank == 0:
            contents.model[inner_name] = tensor
        elif inner_name not in contents.model:
            contents.unjoined[name] = tensor

    return contents


def _sort_optimizer_tensor(contents: _Contents, name: str, rank: int | None, tensor: Tensor) -> None:
    """Add a tensor of the optimizer. rank: None for a tensor without label."""
    _, _, inner_name = name.removeprefix("optimizer.").partition(".")
    flat = _FLAT.fullmatch(inner_name)
    state = _STATE.fullmatch(inner_name)
    if rank is None:
        contents.unjoined[name] = tensor
    elif flat is not None:
        contents.flats[flat[1]][rank] = tensor
    elif state is not None:
        contents.states[_State(state[1], rank)][state[2]] = tensor
    else:
        contents.unjoined[name] = tensor


def _read_sizes(snapshot: Snapshot, start: str) -> dict[str, list[int]]:
    """Return the lists of sizes below a name. Raises MalformedFile for other values."""
    lists: dict[str, list[int]] = {}
    for full_name, value in snapshot.values.items():
        if not full_name.startswith(start):
            continue

        name = full_name.removeprefix(start)
        # An empty list of sizes: a scalar.
        if value == "()":
            lists[name] = []
        elif are_naturals([value]):
            lists.setdefault(name.rpartition(".")[0], []).append(value)
        else:
            raise malformed_folder(
                snapshot.path,
                place=full_name,
                found=brief(value),
                needed="a size",
            )

    return lists


def _check_shape(path: str, name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if len(sizes) > MOST_DIMENSIONS or math.prod(sizes) > MOST_ELEMENTS:
        raise malformed_folder(
            path,
            place=f"shape of {brief(name)}",
            found=brief(sizes),
            needed="the shape of a tensor",
        )

    return tuple(sizes)


class _Joined:
    """The whole tensors of a folder, and the shards of which the others will be joined."""

    def __init__(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._path = path
        self._shapes = shapes
        self._shards: dict[tuple[str, str], list[Shard]] = defaultdict(list)
        self._whole_tensors: dict[str, Tensor] = {}
        self._count = 0

    def add(self, chunk: Chunk, flat: Tensor, states: Mapping[str, Tensor]) -> None:
        """Add a chunk of a parameter and of its states. Raises MalformedFile for too many of them.

        flat: the rank's flat tensor with the chunk.
        states: of the flat tensor, by name.
        """
        self._add_shards(chunk, "", flat)
        for state, tensor in states.items():
            if _is_flat(tensor) and tensor.numel >= flat.numel:
                self._add_shards(chunk, state, tensor)
            elif tensor.shape:  # not by element, like the scales of 8-bit optimizers
                self._whole_tensors[tensor.name] = tensor
            elif chunk.length:  # the step of the group
                self._whole_tensors.setdefault(f"optimizer.{chunk.parameter}.{state}", tensor)

        # Untrusted shapes can have any number of chunks.
        self._count += 1 + len(states)
        if self._count > _MOST_SHARDS:
            found = f"more than {_MOST_SHARDS} parts of tensors"
            raise malformed_folder(
                self._path,
                place="partitions",
                found=found,
                needed="a readable layout",
            )

    def _add_shards(self, chunk: Chunk, state: str, flat: Tensor) -> None:
        shape = self._shapes[chunk.parameter]
        shards = cut_flat_tensor(
            flat,
            position=chunk.position,
            shape=shape,
            start=chunk.start,
            count=chunk.length,
        )
        self._shards[chunk.parameter, state] += shards

    def combine(self) -> dict[str, Tensor]:
        """Return all whole tensors. Raises MalformedFile for shards of several dtypes, and for holes."""
        for (parameter, state), shards in self._shards.items():
            name = f"optimizer.{parameter}.{state}" if state else parameter
            dtypes = sorted({shard.tensor.dtype for shard in shards}) or ["float32"]
            if len(dtypes) > 1:
                found = f"parts of dtype {' and '.join(dtypes)}"
                raise malformed_folder(
                    self._path,
                    place=f"tensor {brief(name)}",
                    found=found,
                    needed="one dtype",
                )

            self._whole_tensors[name] = combine(
                name=name,
                dtype=dtypes[0],
                shape=self._shapes[parameter],
                shards=shards,
                path=self._path,
            )

        return self._whole_tensors


def _join_groups(
    path: str, contents: _Contents, groups: Groups, paddings: Mapping[str, Sequence[int]] | None, ranks: int
) -> dict[str, Tensor]:
    """Return the whole weights and optimizer states. paddings: after each parameter, by group; None for ZeRO 3."""
    shapes = _collect_shapes(path, contents, groups)
    joined = _Joined(path, shapes)
    for group, members in groups.items():
        flats = [flat for _, flat in sorted(contents.flats[group].items()) if _is_flat(flat)]
        if len(flats) < ranks:
            raise malformed_folder(
                path,
                place=f"group {brief(group)}",
                found=f"flat tensors of {len(flats)} ranks",
                needed=f"{ranks} ranks",
            )

        sizes = {name: math.prod(shape) for name, shape in members.items()}
        lengths = [flat.numel for flat in flats]
        if paddings is None:
            chunks = split_parameters(
                path,
                group,
                sizes=sizes,
                lengths=lengths,
            )
        else:
            # In a folder without paddings, the parameters follow each other.
            gaps = paddings.get(group) or [0] * len(sizes)
            chunks = split_group(
                path,
                group,
                sizes=sizes,
                lengths=lengths,
                gaps=gaps,
            )

        for chunk in chunks:
            joined.add(chunk, flats[chunk.rank], contents.states[_State(group, chunk.rank)])

    return joined.combine()


def _collect_shapes(path: str, contents: _Contents, groups: Groups) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters. Raises MalformedFile if they do not belong to the flat tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    count = 0
    for members in groups.values():
        shapes |= members
        count += len(members)

    groups_with_data: set[str] = set()
    for group, flats in contents.flats.items():
        if any(flat.numel for flat in flats.values()):
            groups_with_data.add(group)

    # Groups without elements may be missing in param_shapes.
    if groups_with_data <= groups.keys() and len(shapes) == count:
        return shapes

    raise malformed_folder(
        path,
        place="param_shapes",
        found=f"{len(shapes)} parameters in groups {brief(sorted(groups))}",
        needed=f"each parameter once, in groups {brief(sorted(groups_with_data))}",
    )


def _is_flat(tensor: Tensor) -> bool:
    """Whether a tensor has one dimension, and its bytes are contiguous in a file."""
    exceptions = (tensor.refused, tensor.lazy, tensor.shards)
    if any(exceptions):
        return False

    return is_in_file(tensor) and tensor.strides == (1,)


def _join_values(values: Mapping[str, Any], labels: Container[str]) -> dict[str, Any]:
    """Return the values without the layout. A value that is equal on all ranks has no label.

    For the optimizer, only its settings, its states and the loss scaler remain.
    """
    joined: dict[str, Any] = {}
    for name, value in values.items():
        plain_name = _strip_label(name, labels)
        if _LAYOUT.match(plain_name) or is_membership(plain_name):
            continue

        # A value that differs between ranks keeps the label of its rank.
        if joined.setdefault(plain_name, value) != value:
            joined[name] = value

    return joined


def _strip_label(name: str, labels: Container[str]) -> str:
    """Return the name of a value without the label of its rank; empty for values about partitions."""
    container = "optimizer." if name.startswith("optimizer.") else ""
    label, _, inner_name = name.removeprefix(container).partition(".")
    if label not in labels:
        return name

    if not container or inner_name.startswith(("param_groups.", "loss_scaler.")):
        return container + inner_name

    state = _STATE.fullmatch(inner_name)
    if state is None:
        return ""

    return f"optimizer.{state[1]}.{state[2]}"
