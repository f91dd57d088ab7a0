"""Which names of a checkpoint are one tensor, and on which ranks only.

torch.save keeps that two names share memory, and torch.load gives it back. Other formats write each name's bytes, so
nothing can be said of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.records import Tie

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from syncheck.snapshots import Snapshot, Tensor

# Formats that can store a tie.
_ABLE = ("torch-zip", "torch-legacy")


def broken_ties(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> tuple[Tie, ...]:
    """Find names that are one tensor on some ranks and several tensors on others.

    names: by rank, from stored to compared names. A rank that lacks one of the names tells nothing of the tie.
    """
    tied = {
        rank: {
            frozenset(names[rank][name] for name in same)
            for same in snapshot.ties or find_shared_tensors(snapshot.tensors.values())
        }
        for rank, snapshot in snapshots.items()
        if snapshot.format in _ABLE
    }
    found = []
    for tie in set[frozenset[str]]().union(*tied.values()):
        together = tuple(rank for rank, sets in tied.items() if tie in sets or any(tie < same for same in sets))
        if len(together) < len(tied) and any(tie <= set(names[rank].values()) for rank in tied if rank not in together):
            found.append(Tie(tuple(sorted(tie)), together))
    return tuple(sorted(found, key=lambda tie: tie.names))


def find_shared_tensors(tensors: Collection[Tensor]) -> list[list[str]]:
    """List the names that have one place: the same first element, shape and strides."""
    first: dict[tuple[str, int], Tensor] = {}
    twice = set()
    for tensor in tensors:  # most have a place of their own, so no more is looked at until one has not
        place = tensor.path, tensor.offset
        if tensor.data is not None or tensor.refused or not tensor.numel:
            continue
        if place in first:
            twice.add(place)
        first[place] = tensor
    if not twice:
        return []
    same: dict[Hashable, list[str]] = defaultdict(list)
    for tensor in tensors:
        if (tensor.path, tensor.offset) in twice and tensor.data is None and not tensor.refused and tensor.numel:
            same[tensor.path, tensor.offset, tensor.dtype, tensor.shape, tensor.strides].append(tensor.name)
    return [found for found in same.values() if len(found) > 1]
