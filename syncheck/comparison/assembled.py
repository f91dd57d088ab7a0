"""One tensor, saved as shards by some ranks and whole by others: the shards of one mesh are put together to a whole."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.comparison.replica_groups import coordinate, is_whole
from syncheck.snapshots import Part, Tensor, in_c_order

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


def is_mixed(tensors: Mapping[int, Tensor]) -> bool:
    """Whether some ranks hold a shard and others the whole."""
    sharded = sum(t.sharding is not None and not is_whole(t.sharding) for t in tensors.values())
    return 0 < sharded < len(tensors)


def wholes(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the whole tensor for each rank; empty if a shard is missing, or its position is not known."""
    boxes: dict[Hashable, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    keys: dict[int, Hashable] = {}
    for rank, tensor in tensors.items():
        if tensor.sharding is None or is_whole(tensor.sharding):
            continue
        box = _box(rank, tensor)
        if box is None:
            return {}
        keys[rank], start = box
        boxes[keys[rank]].setdefault(start, tensor)
    made = {}
    for key, found in boxes.items():
        first = next(iter(found.values()))
        shape = first.sharding.shape if first.sharding is not None else ()
        alike = len({tensor.dtype for tensor in found.values()}) == 1
        if not alike or sum(tensor.numel for tensor in found.values()) != math.prod(shape):
            return {}
        parts = tuple(Part(tensor, start) for start, tensor in sorted(found.items()) if tensor.numel)
        whole = Tensor(first.name, first.dtype, shape, in_c_order(shape), first.path, 0, data=None if parts else b"")
        made[key] = replace(whole, parts=parts)
    return {rank: made[keys[rank]] if rank in keys else tensor for rank, tensor in tensors.items()}


def _box(rank: int, tensor: Tensor) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return which copy of the whole a shard belongs to and where it begins, by the rules of torch.chunk."""
    sharding = tensor.sharding
    place = None if sharding is None else coordinate(rank, sharding)
    if sharding is None or place is None or tensor.refused or tensor.digest is not None or tensor.same:
        return None
    start, size, copy = [0] * len(sharding.shape), list(sharding.shape), []
    for placement, at, count in zip(sharding.placements, place, sharding.mesh, strict=True):
        if placement == "R":
            copy.append(at)
        elif placement.startswith("S(") and (dim := int(placement[2:-1])) < len(size):
            rows = -(-size[dim] // count)
            begin = min(at * rows, size[dim])
            start[dim], size[dim] = start[dim] + begin, min(rows, size[dim] - begin)
        else:
            return None
    return ((sharding.ranks, tuple(copy)), tuple(start)) if tuple(size) == tensor.shape else None
