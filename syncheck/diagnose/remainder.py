"""What a finding leaves of the differences that it covers: those among ranks that its cause does not set apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.evidence.suspects import sets_within

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.records import TensorDiff

    Blocks = Sequence[Sequence[int]]


def left_of(tensors: Sequence[TensorDiff], covered: Sequence[TensorDiff], agree: Blocks) -> tuple[TensorDiff, ...]:
    """Return the differences that stay open. covered: of these, by the finding; agree: as in `Match`."""
    names = {(diff.name, diff.reason) for diff in covered}
    left = (_remainder(diff, agree) if (diff.name, diff.reason) in names else diff for diff in tensors)
    return tuple(diff for diff in left if diff is not None)


def names_left(
    values: Sequence[str], covered: Sequence[str], by_rank: Mapping[str, Mapping[int, Any]], agree: Blocks
) -> tuple[str, ...]:
    """Return the Python values that stay open, as `left_of` does."""
    names = frozenset(covered)
    return tuple(
        name
        for name in values
        if name not in names or any(_unequal([by_rank[name].get(rank) for rank in block]) for block in agree)
    )


def _unequal(values: Sequence[Any]) -> bool:
    return any(value != values[0] and not (value != value and values[0] != values[0]) for value in values[1:])


def _remainder(diff: TensorDiff, agree: Blocks) -> TensorDiff | None:
    """Return how a tensor differs within the blocks; None where it does not.

    By how much is not known: the numbers of a difference are of all its ranks.
    """
    whole = sets_within(diff)
    inside = [_inside(sets, frozenset(block)) for sets in whole for block in agree]
    inside = [sets for sets in inside if len(sets) > 1]
    if not inside:
        return None
    if sum(map(len, inside)) == sum(map(len, whole)) and all(sets in whole for sets in inside):
        return diff
    clusters = sorted((ranks for sets in inside for ranks in sets), key=lambda ranks: (-len(ranks), ranks[0]))
    there = {rank for ranks in clusters for rank in ranks}
    return replace(
        diff,
        replica_groups=tuple(tuple(sorted(rank for ranks in sets for rank in ranks)) for sets in inside),
        clusters=tuple(clusters),
        minority=tuple(sorted(rank for sets in inside if len(sets[0]) > len(sets[1]) for s in sets[1:] for rank in s)),
        nonfinite={rank: count for rank, count in diff.nonfinite.items() if rank in there},
        mismatched=None, max_abs=None, max_rel=None, max_ulp=None, index=None, extent=None, evidence=None,
        histogram=None,
    )  # fmt: skip


def _inside(sets: Sequence[tuple[int, ...]], block: Collection[int]) -> list[tuple[int, ...]]:
    """Return the parts of the sets that lie in a block, largest first."""
    kept = (tuple(rank for rank in ranks if rank in block) for ranks in sets)
    return sorted((ranks for ranks in kept if ranks), key=lambda ranks: (-len(ranks), ranks[0]))
