"""Sets of ranks with equal values."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_Value = TypeVar("_Value")


def group_ranks(values: Mapping[int, _Value]) -> dict[_Value, list[int]]:
    """Return the ranks of each value, in the order of the first occurrence of the values."""
    ranks: dict[_Value, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def largest_first(sets: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Sort sets of ranks by size, the largest first; equally large sets by their first ranks."""
    return tuple(tuple(ranks) for ranks in sorted(sets, key=lambda ranks: (-len(ranks), ranks[0])))


def minority_of(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest set; empty if two sets are the largest. sets: largest first."""
    if len(sets) < 2 or len(sets[0]) == len(sets[1]):
        return ()
    return tuple(sorted(rank for ranks in sets[1:] for rank in ranks))
