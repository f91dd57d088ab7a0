"""Compare the bytes of one tensor on any number of replicas.

Each replica's bytes are read until it is known to stand alone, and the replicas are sorted into clusters of equal
bytes. Where there is more than one cluster, `gaps.measure` then says by how much they differ. Neither depends on the
order of the replicas: swapping two files changes nothing but their labels. numpy is not needed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.blocks import Files, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Tensor


def clusters(tensors: Sequence[Tensor], files: Files) -> tuple[tuple[int, ...], ...]:
    """Sort replicas of one tensor into sets of equal bytes.

    tensors: of one dtype and shape. Returns positions in `tensors`, the largest set first, then by first position.
    Raises MalformedFile when a file has become shorter.
    """
    groups = [list(range(len(tensors)))]
    for start, count in ranges(tensors):
        if len(groups) == len(tensors):
            break
        split: list[list[int]] = []
        for members in groups:
            split += [members] if len(members) == 1 else _split(members, tensors, files, start, count)
        groups = split
    return tuple(tuple(members) for members in sorted(groups, key=lambda members: (-len(members), members[0])))


def _split(members: list[int], tensors: Sequence[Tensor], files: Files, start: int, count: int) -> list[list[int]]:
    """Split replicas that were equal so far by the bytes of one block."""
    first = files.read(tensors[members[0]], start, count, slot=0)
    same, others = [members[0]], dict[bytes, list[int]]()
    for member in members[1:]:
        block = files.read(tensors[member], start, count, slot=1)
        if block == first:
            same.append(member)
        else:
            others.setdefault(bytes(block), []).append(member)
    return [same, *others.values()]
