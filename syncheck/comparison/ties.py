"""Find tied tensors: names sharing memory on some ranks only.

torch.save and torch.load preserve shared memory. Other formats store separate bytes for each name, so ties are unknown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from syncheck.records import Tie

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from syncheck.snapshots import Snapshot, Tensor

_FORMATS_WITH_TIES = ("torch-zip", "torch-legacy")


def broken_ties(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> tuple[Tie, ...]:
    """Return the ties present on some ranks only.

    names: by rank, from stored to normalized names. Ranks that lack a name do not count.
    """
    tied = {
        rank: {
            frozenset(names[rank][name] for name in same)
            for same in snapshot.ties or find_shared_tensors(snapshot.tensors.values())
        }
        for rank, snapshot in snapshots.items()
        if snapshot.format in _FORMATS_WITH_TIES
    }
    broken = []
    for tie in set[frozenset[str]]().union(*tied.values()):
        together = tuple(rank for rank, sets in tied.items() if tie in sets or any(tie < same for same in sets))
        if len(together) < len(tied) and any(tie <= set(names[rank].values()) for rank in tied if rank not in together):
            broken.append(Tie(tuple(sorted(tie)), together))
    return tuple(sorted(broken, key=lambda tie: tie.names))


def find_shared_tensors(tensors: Collection[Tensor]) -> list[list[str]]:
    """Return lists of names with the same storage offset, dtype, shape and strides."""
    places = [_find_place(tensor) for tensor in tensors]
    shared = {place for place, count in Counter(places).items() if count > 1}  # most offsets are unique
    tied: dict[Hashable, list[str]] = defaultdict(list)
    for tensor, place in zip(tensors, places, strict=True):
        if place is not None and place in shared:
            boxes = tuple((shard.start, _find_place(shard.tensor), shard.tensor.strides) for shard in tensor.shards)
            tied[place, tensor.dtype, tensor.shape, tensor.strides, boxes].append(tensor.name)
    return [names for names in tied.values() if len(names) > 1]


def _find_place(tensor: Tensor) -> tuple[str, int] | None:
    """Return the file and the offset of the first element, or None for a tensor without bytes in a file."""
    first = tensor.shards[0].tensor if tensor.shards else tensor
    unplaced = tensor.refused or not tensor.numel or first.data is not None or first.digest is not None
    return None if unplaced else (first.path, first.offset)
