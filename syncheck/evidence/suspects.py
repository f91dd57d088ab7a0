"""Identify the ranks that cause differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from syncheck.records import Comparison, TensorDiff


def suspects(tensors: Iterable[TensorDiff], group: Comparison) -> tuple[int, ...]:
    """Return the ranks outside the majority of the tensors. Without a majority, return all ranks with differences.

    If most of the tensors have no majority, a majority in a few of them does not count: for example, two ranks may
    agree on a bias that changes only by rounding.
    """
    # Running statistics differ between ranks without a fault, so they only count if no other tensor differs.
    diffs = list(tensors)
    diffs = [diff for diff in diffs if diff.kind not in BN_STATISTICS] or diffs
    odd = {rank for diff in diffs for rank in diff.minority}
    without = sum(len(diff.clusters) > 1 and not diff.minority for diff in diffs)
    if not odd or len(odd) >= len(group.replicas) or 2 * without > len(diffs):
        odd = {rank for diff in diffs for cluster in diff.clusters for rank in cluster}
    return tuple(sorted(odd)) or group.ranks


def sets_within(diff: TensorDiff) -> list[list[tuple[int, ...]]]:
    """Return the clusters of each replica group with differences."""
    if len(diff.replica_groups) < 2:
        return [list(diff.clusters)] if len(diff.clusters) > 1 else []
    # A cluster lies in one replica group. The dictionary avoids a search: 1,000 ranks may have hundreds of groups.
    group_of = {rank: i for i, group in enumerate(diff.replica_groups) for rank in group}
    clusters: list[list[tuple[int, ...]]] = [[] for _ in diff.replica_groups]
    for ranks in diff.clusters:
        clusters[group_of[ranks[0]]].append(ranks)
    return [sets for sets in clusters if len(sets) > 1]
