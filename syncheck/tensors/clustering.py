"""Group the replicas of one tensor into clusters with equal bytes.

A replica is read until it differs from all other replicas. The result does not depend on the order of the replicas:
swapping two files changes only their labels. `differences` measures how far the clusters differ. This module does not
need numpy.
"""

from __future__ import annotations

from collections import defaultdict
from threading import Event
from typing import TYPE_CHECKING

from syncheck.records import largest_first
from syncheck.tensors.blocks import run_in_shares

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.finiteness import FiniteScan

    Groups = list[list[int]]


def cluster_replicas(
    tensors: Sequence[Tensor], files: Files, scan: FiniteScan | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return clusters of replicas with equal bytes, as positions in `tensors`.

    The largest cluster comes first; ties are broken by the first position. All tensors must have the same dtype and
    shape. scan: searches the first of equal blocks, if bytes are read. Raises MalformedFile if a file has been
    truncated.
    """
    if all(tensor.same for tensor in tensors):
        return cluster_by_key([tensor.same for tensor in tensors])

    all_differ = Event()

    def split_by_share(share: Iterator[tuple[int, int]], job: int) -> Groups:
        """Group replicas by the blocks of one share. Stop as soon as any share has found all replicas to differ."""
        groups = [list(range(len(tensors)))]
        for part in share:
            if all_differ.is_set():
                break

            groups_of_block: Groups = []
            for members in groups:
                # The bytes of a replica that differs from all others do not matter any more.
                if len(members) == 1:
                    groups_of_block.append(members)
                else:
                    groups_of_block += _split(
                        members,
                        tensors,
                        files,
                        part,
                        2 * job,
                        scan,
                    )

            groups = groups_of_block
            if len(groups) == len(tensors):
                all_differ.set()

        return groups

    groups_by_share = run_in_shares(tensors, files, split_by_share)
    return _intersect(groups_by_share, len(tensors))


def cluster_by_key(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Return clusters of positions with equal keys, in the order of `cluster_replicas`."""
    by_key: dict[Hashable, list[int]] = defaultdict(list)
    for position, key in enumerate(keys):
        by_key[key].append(position)

    return largest_first(by_key.values())


def _split(
    members: list[int],
    tensors: Sequence[Tensor],
    files: Files,
    part: tuple[int, int],
    slot: int,
    scan: FiniteScan | None,
) -> Groups:
    """Split replicas that were equal so far by the bytes of one block. Uses the buffers `slot` and `slot + 1`.

    part: first element and number of elements of the block.
    """
    first_block = files.read(tensors[members[0]], *part, slot)
    if scan is not None:
        scan.look(first_block)

    equal_members = [members[0]]
    groups_by_bytes: dict[bytes, list[int]] = {}
    for member in members[1:]:
        block = files.read(tensors[member], *part, slot + 1)
        if block == first_block:
            equal_members.append(member)
        else:
            groups_by_bytes.setdefault(bytes(block), []).append(member)

    return [equal_members, *groups_by_bytes.values()]


def _intersect(shares: Sequence[Groups], size: int) -> tuple[tuple[int, ...], ...]:
    """Return clusters of replicas that are equal in every share of the blocks, in the order of `cluster_replicas`."""
    # Most tensors are small, and have one share.
    if len(shares) == 1:
        return largest_first(shares[0])

    # The key of a replica is the number of its group in each share.
    keys: list[tuple[int, ...]] = [()] * size
    for groups in shares:
        for number, members in enumerate(groups):
            for member in members:
                keys[member] = (*keys[member], number)

    return cluster_by_key(keys)
