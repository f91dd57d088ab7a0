"""Boxes of DTensors: the mesh, the coordinate and the placements of a rank determine the elements in its file."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.layout.boxes import MOST_BOXES, Runs, chunk_runs, combine, count_indices, cut_tensor
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.snapshots import Shard, Sharding, Tensor

# Limit of the dimensions of a mesh. Untrusted files can claim thousands of dimensions, all of size 1.
_MOST_DIMS = 8
# What the parts of a tensor add up to, by the operation of their placement; a sum by default.
_REDUCTIONS = {"avg": "an average", "product": "a product", "max": "a maximum", "min": "a minimum"}
# S(0), or _S(0, 2) for a strided shard. The digits are those of str.isdecimal().
_SPLIT = r"_?S\((\d+)(?:,\s*(\d+)\s*)?\)?"


def find_shards(rank: int, tensor: Tensor) -> list[Shard] | None:
    """Return the boxes in a rank's part of a DTensor; None if the file does not show them, as for partial sums.

    Raises MalformedFile if the part has another shape than its layout.
    """
    sharding = tensor.sharding
    if sharding is None:
        return None

    runs = find_runs(rank, tensor, sharding)
    if runs is None:
        return None

    # Files are untrusted: the part must have the shape that follows from its layout.
    _check_shape(
        rank,
        tensor,
        sharding=sharding,
        runs=runs,
    )
    if not tensor.numel:
        return []

    try:
        return cut_tensor(tensor, runs)
    except ValueError:
        return None


def find_runs(rank: int, tensor: Tensor, sharding: Sharding) -> list[Runs] | None:
    """Return the indices of the full tensor in a rank's part, by dimension; None if the file does not show them."""
    if tensor.refused or len(sharding.mesh) > _MOST_DIMS:
        return None

    # Fingerprints, and tensors whose bytes are not read, have no bytes to cut into boxes.
    has_bytes = tensor.digest is None and not tensor.same
    coordinate = find_coordinate(rank, sharding)
    splits = _order_splits(sharding)
    # Partial sums have no box.
    if coordinate is None or splits is None or not has_bytes:
        return None

    runs: list[Runs] = [((0, size),) for size in sharding.shape]
    for split in splits:
        if split.dim >= len(runs):
            return None

        # A tensor without elements has no runs.
        run_count = max(len(runs[split.dim]), 1)
        if split.stripes * run_count > MOST_BOXES:
            return None

        count = sharding.mesh[split.mesh_dim]
        chunks: list[tuple[int, int]] = []
        for stripe_number in range(split.stripes):
            stripe = chunk_runs(runs[split.dim], split.stripes, stripe_number)
            chunks += chunk_runs(stripe, count, coordinate[split.mesh_dim])

        runs[split.dim] = tuple(chunks)

    return runs


def _check_shape(rank: int, tensor: Tensor, sharding: Sharding, runs: Iterable[Runs]) -> None:
    """Raise MalformedFile if a part has another shape than its layout.

    sharding: of the tensor.
    runs: of the layout.
    """
    shape = tuple(map(count_indices, runs))
    if shape == tensor.shape:
        return

    coordinate = find_coordinate(rank, sharding)
    assert coordinate is not None
    raise MalformedFile(
        tensor.path,
        place=f"tensor {brief(tensor.name)}",
        found=f"a part of shape {list(tensor.shape)}",
        needed=f"{list(shape)}, the part of {list(sharding.shape)} at mesh coordinate {list(coordinate)}",
    )


class _Split(NamedTuple):
    """The split of a dimension of a tensor along a dimension of the mesh. stripes: each of them is split."""

    mesh_dim: int
    dim: int
    stripes: int


def _order_splits(sharding: Sharding) -> list[_Split] | None:
    """Return the splits in the order in which torch applied them.

    Placements apply from left to right: `S(d)` splits dimension d like torch.chunk. `_S(d, n)` is applied after mesh
    dimensions to its right with n ranks together, as FSDP2 splits tensors that tensor parallelism has already sharded.
    If a tensor has an `_S(d, n)` without such mesh dimensions, all of its placements apply from left to right, and
    `_S(d, n)` splits each of n stripes. None for other placements. Source:
    torch/distributed/tensor/_dtensor_spec.py, _maybe_convert_StridedShard_to_shard_order.
    """
    splits: list[_Split] = []
    for mesh_dim, placement in enumerate(sharding.placements):
        if placement == "R":
            continue

        match = re.fullmatch(_SPLIT, placement)
        if match is None:
            return None

        stripes = match[2] or 1
        splits.append(_Split(mesh_dim, dim=int(match[1]), stripes=int(stripes)))

    ordered: list[_Split] = []
    for split in reversed(splits):
        position = 0
        ranks = 1
        while ranks < split.stripes and position < len(ordered):
            later = ordered[position]
            if later.dim == split.dim:
                ranks *= sharding.mesh[later.mesh_dim]

            position += 1

        # The stripes are not those of other mesh dimensions, so they are literal.
        if ranks != split.stripes:
            return splits

        ordered.insert(position, split._replace(stripes=1))

    return ordered


def assemble_copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the whole tensor for each rank, if some ranks hold shards and other ranks the whole tensor.

    The ranks with the shards of one copy share a tensor. Empty if a shard is missing, or its position is unknown.
    """
    sharded: dict[int, Tensor] = {}
    dtypes: set[str] = set()
    for rank, tensor in tensors.items():
        if is_sharded(tensor):
            sharded[rank] = tensor
            dtypes.add(tensor.dtype)

    if len(dtypes) > 1:
        return {}

    # A missing or damaged shard is no error here: the tensor is reported as not comparable.
    try:
        whole_tensors = _assemble(sharded)
    except MalformedFile:
        whole_tensors = {}

    if not whole_tensors:
        return {}

    return {**tensors, **whole_tensors}


def _assemble(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the whole tensor for each rank with a shard. Empty if a position is unknown. Raises MalformedFile."""
    shards_of_copy: dict[Hashable, list[Shard]] = defaultdict(list)
    copy_of_rank: dict[int, Hashable] = {}
    for rank, tensor in tensors.items():
        shards = find_shards(rank, tensor)
        if shards is None or tensor.sharding is None:
            return {}

        # A tensor has boxes only if its coordinate is known.
        coordinate = find_coordinate(rank, tensor.sharding)
        assert coordinate is not None
        _, copied_coordinates = split_coordinate(tensor.sharding, coordinate)
        copy_of_rank[rank] = (tensor.sharding.ranks, copied_coordinates)
        shards_of_copy[copy_of_rank[rank]] += shards

    first = next(iter(tensors.values()))
    whole_tensors: dict[Hashable, Tensor] = {}
    for copy, shards in shards_of_copy.items():
        whole_tensors[copy] = combine(
            name=first.name,
            dtype=first.dtype,
            shape=first.full_shape,
            shards=shards,
            path=first.path,
        )

    return {rank: whole_tensors[copy] for rank, copy in copy_of_rank.items()}


def is_whole(sharding: Sharding) -> bool:
    """Whether each rank of the mesh holds the whole tensor. Dimensions of size 1 divide nothing."""
    return all(p == "R" or size == 1 for p, size in zip(sharding.placements, sharding.mesh, strict=True))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds a part of a DTensor."""
    return tensor.sharding is not None and not is_whole(tensor.sharding)


def layout_text(sharding: Sharding) -> str:
    """Describe the layout of a DTensor: 'copied to 2 along replicate, divided in 2 along shard (dimension 0)'."""
    names = sharding.names or ("",) * len(sharding.mesh)
    return ", ".join(map(_describe_placement, sharding.placements, sharding.mesh, names))


def _describe_placement(placement: str, size: int, name: str) -> str:
    """Describe a placement in the notation of torch: R, S(0), P(sum), or _S(0, 2) for a strided shard."""
    along = f" along {name}" if name else ""
    if placement == "R":
        return f"copied to {size}{along}"

    letter, _, argument = placement.rstrip(")").partition("(")
    if letter == "P":
        return f"{size} parts of {_REDUCTIONS.get(argument, 'a sum')}{along}"

    dimension, _, stripes = argument.partition(",")
    if stripes:
        dimension = f"{dimension}, in stripes of {stripes.strip()}"

    return f"divided in {size}{along} (dimension {dimension})"


def is_part_of_sum(tensor: Tensor) -> bool:
    """Whether the whole tensor is the sum, or another reduction, of the tensors of several ranks."""
    placements = tensor.sharding.placements if tensor.sharding else ()
    return "P" in "".join(placements)


def find_coordinate(rank: int, sharding: Sharding) -> tuple[int, ...] | None:
    """Return the mesh coordinate of a rank from its file, else from its rank; None if unknown."""
    if sharding.coordinate:
        return sharding.coordinate

    return _coordinates_by_rank(sharding.ranks, sharding.mesh).get(rank)


@lru_cache(maxsize=64)
def _coordinates_by_rank(ranks: tuple[int, ...], mesh: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    dimensions = [range(size) for size in mesh]
    return dict(zip(ranks, product(*dimensions), strict=False))


def split_coordinate(sharding: Sharding, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the coordinates in the dividing dimensions of the mesh, and in the dimensions with copies."""
    dividing: list[int] = []
    copied: list[int] = []
    for placement, number in zip(sharding.placements, coordinate, strict=True):
        if placement == "R":
            copied.append(number)
        else:
            dividing.append(number)

    return tuple(dividing), tuple(copied)


def find_mesh_rank(sharding: Sharding) -> int:
    """Return the rank at the coordinate of a sharding."""
    position = 0
    for number, size in zip(sharding.coordinate, sharding.mesh, strict=True):
        position = position * size + number

    return sharding.ranks[position]
