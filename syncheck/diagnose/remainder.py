"""What a finding leaves unexplained: the differences within sets of ranks that its cause does not set apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.selection import index_by_name, join_ranks, select_names
from syncheck.records import largest_first, minority_of, sets_within

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff, ValueDiff

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
        remainder: TensorDiff | None = diff
        if (diff.name, diff.reason) in explained:
            # The cause sets the blocks of ranks apart, and explains no difference within a block.
            remainder = _restrict(diff, agree)
        if remainder is not None:
            unexplained.append(remainder)
    return tuple(unexplained)


def find_unexplained_values(case: Case, covered: Sequence[str], agree: Blocks) -> tuple[str, ...]:
    """Return the Python values of a case that a finding leaves unexplained. covered: its values. agree: see `Match`."""
    covered_names = frozenset(covered)
    covered_values = select_names(case.group.values, covered_names)
    explained = index_by_name(covered_values)
    unexplained = []
    for name in case.values:
        value = explained.get(name)
        if value is None or _differs_within(value, agree):
            unexplained.append(name)
    return tuple(unexplained)


def _differs_within(value: ValueDiff, agree: Blocks) -> bool:
    """Whether a value differs between the ranks of any block."""
    for block in agree:
        for rank in block:
            # All ranks of a block are compared with its first rank.
            first = value.by_rank.get(block[0])
            number = value.by_rank.get(rank)
            if not _are_equal(number, first):
                return True
    return False


def _are_equal(value: Any, other_value: Any) -> bool:
    """Whether two values are equal, or both are NaN."""
    is_different = value != other_value
    # Only NaN differs from itself.
    is_nan = value != value
    is_other_nan = other_value != other_value
    both_nan = is_nan and is_other_nan
    return both_nan or not is_different


def _restrict(diff: TensorDiff, blocks: Blocks) -> TensorDiff | None:
    """Return the difference within the blocks of ranks, or None if the ranks of each block agree.

    Its size is unknown, because a difference was measured over all ranks.
    """
    clusters_of_groups = sets_within(diff)
    remaining: list[Clusters] = []
    for clusters, block in product(clusters_of_groups, blocks):
        within = _intersect(clusters, frozenset(block))
        if len(within) > 1:
            remaining.append(within)
    if not remaining:
        return None
    # The blocks take no rank from any replica group.
    if remaining == clusters_of_groups:
        return diff

    minority: list[int] = []
    replica_groups = []
    for remaining_clusters in remaining:
        minority += minority_of(remaining_clusters)
        replica_groups.append(tuple(sorted(join_ranks(remaining_clusters))))
    differing_ranks = join_ranks(replica_groups)
    return replace(
        diff,
        replica_groups=tuple(replica_groups),
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
