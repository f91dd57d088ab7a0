"""What a finding leaves unexplained: the differences within sets of ranks that its cause does not set apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.selection import join_ranks
from syncheck.records import largest_first, minority_of, sets_within

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.records import TensorDiff

    Blocks = Sequence[Sequence[int]]
    Clusters = Sequence[tuple[int, ...]]


def find_unexplained_tensors(
    tensors: Sequence[TensorDiff], covered: Sequence[TensorDiff], agree: Blocks
) -> tuple[TensorDiff, ...]:
    """Return the differences left unexplained by a finding. covered: its tensors. agree: see `Match`."""
    # A tensor with several problems has one difference for each reason.
    explained = {(diff.name, diff.reason) for diff in covered}
    unexplained = []
    for diff in tensors:
        if (diff.name, diff.reason) not in explained:
            unexplained.append(diff)
            continue
        # The cause sets the blocks of ranks apart, and explains no difference within a block.
        remainder = _restrict(diff, agree)
        if remainder is not None:
            unexplained.append(remainder)
    return tuple(unexplained)


def find_unexplained_values(
    names: Sequence[str], covered: Sequence[str], by_rank: Mapping[str, Mapping[int, Any]], agree: Blocks
) -> tuple[str, ...]:
    """Return the Python values left unexplained by a finding. covered: its values. agree: see `Match`."""
    explained = frozenset(covered)
    unexplained = []
    for name in names:
        if name not in explained or _differs_within(by_rank[name], agree):
            unexplained.append(name)
    return tuple(unexplained)


def _differs_within(by_rank: Mapping[int, Any], agree: Blocks) -> bool:
    """Whether a value differs between the ranks of any block."""
    for block in agree:
        values = [by_rank.get(rank) for rank in block]
        if not all(_are_equal(value, values[0]) for value in values):
            return True
    return False


def _are_equal(value: Any, other_value: Any) -> bool:
    """Whether two values are equal, or both are NaN."""
    is_different = value != other_value
    both_nan = value != value and other_value != other_value
    return both_nan or not is_different


def _restrict(diff: TensorDiff, blocks: Blocks) -> TensorDiff | None:
    """Return the difference within the blocks of ranks, or None if the ranks of each block agree.

    Its size is unknown, because a difference was measured over all ranks.
    """
    clusters_of_groups = sets_within(diff)
    remaining: list[Clusters] = []
    for clusters in clusters_of_groups:
        for block in blocks:
            within = _intersect(clusters, frozenset(block))
            if len(within) > 1:
                remaining.append(within)
    if not remaining:
        return None
    if _contain_all(remaining, clusters_of_groups):
        return diff
    differing_ranks = join_ranks(chain.from_iterable(remaining))
    minority: list[int] = []
    for remaining_clusters in remaining:
        minority.extend(minority_of(remaining_clusters))
    return replace(
        diff,
        replica_groups=tuple(tuple(sorted(join_ranks(clusters))) for clusters in remaining),
        clusters=largest_first(chain.from_iterable(remaining)),
        minority=tuple(sorted(minority)),
        nonfinite={rank: count for rank, count in diff.nonfinite.items() if rank in differing_ranks},
        mismatched=None,
        max_abs=None,
        max_rel=None,
        max_ulp=None,
        index=None,
        extent=None,
        evidence=None,
        histogram=None,
    )


def _intersect(clusters: Clusters, block: Collection[int]) -> list[tuple[int, ...]]:
    """Return the ranks of each cluster in the block, without empty clusters, largest first."""
    within = []
    for ranks in clusters:
        common = tuple(rank for rank in ranks if rank in block)
        if common:
            within.append(common)
    return list(largest_first(within))


def _contain_all(remaining: Sequence[Clusters], clusters_of_groups: Sequence[Clusters]) -> bool:
    """Whether the blocks take no rank from any replica group."""
    if sum(map(len, remaining)) != sum(map(len, clusters_of_groups)):
        return False
    return all(clusters in clusters_of_groups for clusters in remaining)
