"""Compare the bytes of one tensor on any number of replicas.

Each replica's bytes are read until it is known to stand alone, and the replicas are sorted into clusters of equal
bytes. Where there is more than one cluster, `gaps.measure` then says by how much they differ. Neither depends on the
order of the replicas: swapping two files changes nothing but their labels. numpy is not needed here.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.kernel.shares import run_in_shares

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor

    Groups = list[list[int]]


def cluster_replicas(tensors: Sequence[Tensor], files: Files) -> tuple[tuple[int, ...], ...]:
    """Sort replicas of one tensor into sets of equal bytes.

    tensors: of one dtype and shape. Returns positions in `tensors`, the largest set first, then by first position.
    Raises MalformedFile when a file has become shorter.
    """
    if all(tensor.same for tensor in tensors):
        return cluster_by_key([tensor.same for tensor in tensors])
    apart: list[bool] = []

    def sort(share: Iterator[tuple[int, int]], job: int) -> Groups:
        """Sort by the blocks of one share, and stop where it, or another, found all replicas to differ."""
        groups = [list(range(len(tensors)))]
        for start, count in share:
            if apart:
                break
            split: Groups = []
            for members in groups:
                split += [members] if len(members) == 1 else _split(members, tensors, files, start, count, 2 * job)
            groups = split
            if len(groups) == len(tensors):
                apart.append(True)
        return groups

    return _largest_first(_common(run_in_shares(tensors, files, sort), len(tensors)))


def cluster_by_key(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Sort positions into sets of equal keys, the largest set first, then by first position."""
    by_key: dict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        by_key[key].append(position)
    return _largest_first(by_key.values())


def _largest_first(groups: Iterable[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(members) for members in sorted(groups, key=lambda members: (-len(members), members[0])))


def _split(members: list[int], tensors: Sequence[Tensor], files: Files, start: int, count: int, slot: int) -> Groups:
    """Split replicas that were equal so far by the bytes of one block, read into `slot` and the next."""
    first = files.read(tensors[members[0]], start, count, slot)
    same, others = [members[0]], dict[bytes, list[int]]()
    for member in members[1:]:
        block = files.read(tensors[member], start, count, slot + 1)
        if block == first:
            same.append(member)
        else:
            others.setdefault(bytes(block), []).append(member)
    return [same, *others.values()]


def _common(found: Sequence[Groups], size: int) -> Groups:
    """Keep together what every share of the blocks kept together."""
    if len(found) == 1:
        return found[0]
    places = [{member: i for i, members in enumerate(groups) for member in members} for groups in found]
    together = dict[tuple[int, ...], list[int]]()
    for member in range(size):
        together.setdefault(tuple(place[member] for place in places), []).append(member)
    return list(together.values())
