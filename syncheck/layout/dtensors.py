"""Boxes of DTensors: the mesh, the coordinate and the placements of a rank determine the elements in its file."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile
from syncheck.layout.boxes import MOST_BOXES, Runs, chunk_runs, combine, cut_tensor
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.snapshots import Shard, Sharding, Tensor

# Limit of the dimensions of a mesh. Untrusted files can claim thousands of dimensions, all of size 1.
_MOST_DIMS = 8


def find_shards(rank: int, tensor: Tensor) -> list[Shard] | None:
    """Return the boxes in a rank's part of a DTensor; None if the file does not show them, as for partial sums.

    Raises MalformedFile if the part has another shape than its layout.
    """
    sharding = tensor.sharding
    position = None if sharding is None else find_coordinate(rank, sharding)
    if sharding is None or position is None or tensor.refused or len(sharding.mesh) > _MOST_DIMS:
        return None
    splits = _order_splits(sharding)
    if splits is None:
        return None
    if tensor.digest is not None or tensor.same:  # no bytes to cut into boxes
        return None
    runs: list[Runs] = [((0, size),) for size in sharding.shape]
    for mesh_dim, dim, stripes in splits:
        if dim >= len(runs) or stripes * max(len(runs[dim]), 1) > MOST_BOXES:
            return None
        count, at = sharding.mesh[mesh_dim], position[mesh_dim]
        pieces = (chunk_runs(runs[dim], stripes, i) for i in range(stripes))
        runs[dim] = tuple(chain.from_iterable(chunk_runs(piece, count, at) for piece in pieces))
    shape = tuple(sum(size for _, size in of_axis) for of_axis in runs)
    if shape != tensor.shape:
        raise MalformedFile(
            tensor.path, place=f"tensor {brief(tensor.name)}", found=f"a part of shape {list(tensor.shape)}",
            needed=f"{list(shape)}, the part of {list(sharding.shape)} at mesh coordinate {list(position)}",
        )  # fmt: skip
    if 0 in shape:
        return []
    try:
        return cut_tensor(tensor, runs)
    except ValueError:
        return None


def _order_splits(sharding: Sharding) -> list[tuple[int, int, int]] | None:
    """Return (mesh dimension, tensor dimension, stripes) of each split, in the order in which torch applied them.

    Placements apply from left to right: `S(d)` splits dimension d like torch.chunk. `_S(d, n)` is applied after mesh
    dimensions to its right with n ranks together, as FSDP2 splits tensors that tensor parallelism has already sharded.
    If a tensor has an `_S(d, n)` without such mesh dimensions, all of its placements apply from left to right, and
    `_S(d, n)` splits each of n stripes. None for other placements. Source:
    torch/distributed/tensor/_dtensor_spec.py, _maybe_convert_StridedShard_to_shard_order.
    """
    splits: list[tuple[int, int, int]] = []
    ordered: list[tuple[int, int, int]] = []
    decoded = True
    for mesh_dim, placement in reversed([*enumerate(sharding.placements)]):
        if placement == "R":
            continue
        letter, _, argument = placement.rstrip(")").partition("(")
        dim, _, factor = argument.partition(",")
        if letter not in ("S", "_S") or not dim.isdecimal() or (factor and not factor.strip().isdecimal()):
            return None
        stripes, at, ranks = int(factor or 1), 0, 1
        splits.insert(0, (mesh_dim, int(dim), stripes))
        while ranks < stripes and at < len(ordered):
            ranks *= sharding.mesh[ordered[at][0]] if ordered[at][1] == int(dim) else 1
            at += 1
        ordered.insert(at, (mesh_dim, int(dim), 1))
        decoded = decoded and ranks == stripes
    return ordered if decoded else splits


def assemble_copies(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the whole tensor for each rank, if some ranks hold shards and other ranks the whole tensor.

    The ranks with the shards of one copy share a tensor. Empty if a shard is missing, or its position is unknown.
    """
    boxes: dict[Hashable, list[Shard]] = defaultdict(list)
    keys: dict[int, Hashable] = {}
    for rank, tensor in tensors.items():
        if tensor.sharding is None or is_whole(tensor.sharding):
            continue
        try:
            found, position = find_shards(rank, tensor), find_coordinate(rank, tensor.sharding)
        except MalformedFile:
            return {}
        if found is None or position is None:
            return {}
        copied = zip(tensor.sharding.placements, position, strict=True)
        keys[rank] = (tensor.sharding.ranks, tuple(at for placement, at in copied if placement == "R"))
        boxes[keys[rank]] += found
    first = tensors[next(iter(keys))]
    shape = first.sharding.shape if first.sharding is not None else ()
    if len({tensors[rank].dtype for rank in keys}) > 1:
        return {}
    try:
        whole = {key: combine(first.name, first.dtype, shape, parts, first.path) for key, parts in boxes.items()}
    except MalformedFile:
        return {}
    return {rank: whole[keys[rank]] if rank in keys else tensor for rank, tensor in tensors.items()}


def is_whole(sharding: Sharding) -> bool:
    """Whether each rank of the mesh holds the whole tensor. Dimensions of size 1 divide nothing."""
    return all(p == "R" or size == 1 for p, size in zip(sharding.placements, sharding.mesh, strict=True))


def layout_text(sharding: Sharding) -> str:
    """Describe the layout of a DTensor: 'copied to 2 along replicate, divided in 2 along shard (dimension 0)'."""
    names = sharding.names or ("",) * len(sharding.mesh)
    return ", ".join(map(_placement_text, sharding.placements, sharding.mesh, names))


def _placement_text(placement: str, size: int, name: str) -> str:
    """Describe a placement in the notation of torch: R, S(0), P(sum), or _S(0, 2) for a strided shard."""
    along = f" along {name}" if name else ""
    if placement == "R":
        return f"copied to {size}{along}"
    letter, _, argument = placement.rstrip(")").partition("(")
    if letter == "P":
        return f"{size} parts of a {argument or 'sum'}{along}"
    dimension, _, stripes = argument.partition(",")
    striped = f", in stripes of {stripes.strip()}" if stripes else ""
    return f"divided in {size}{along} (dimension {dimension}{striped})"


def find_coordinate(rank: int, sharding: Sharding) -> tuple[int, ...] | None:
    """Return the mesh coordinate of a rank from its file, else from its rank; None if unknown."""
    if sharding.coordinate:
        return sharding.coordinate
    return _coordinates_by_rank(sharding.ranks, sharding.mesh).get(rank)


@lru_cache(maxsize=64)
def _coordinates_by_rank(ranks: tuple[int, ...], mesh: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    return dict(zip(ranks, product(*map(range, mesh)), strict=False))


def find_mesh_rank(sharding: Sharding) -> int:
    """Return the rank at the coordinate of a sharding."""
    at = 0
    for i, size in zip(sharding.coordinate, sharding.mesh, strict=True):
        at = at * size + i
    return sharding.ranks[at]
