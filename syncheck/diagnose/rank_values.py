"""Values by rank: which ranks deviate, and whether numbers are known."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.selection import join_ranks
from syncheck.records import largest_first, minority_of
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from syncheck.records import TensorDiff


def find_minority(by_rank: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most common value; empty if there is a tie."""
    ranks_by_value = group_ranks(by_rank)
    sets = largest_first(ranks_by_value.values())
    # Two equally large sets are no majority.
    return minority_of(sets)


def below_highest(by_rank: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks with a smaller number than another rank."""
    highest = max(by_rank.values(), default=0.0)
    ranks = []
    for rank in sorted(by_rank):
        if by_rank[rank] < highest:
            ranks.append(rank)
    return tuple(ranks)


def are_unequal(values: Iterable[object]) -> bool:
    """Whether any two values differ."""
    return len(set(values)) > 1


def spread(by_rank: Mapping[int, float]) -> float:
    """Return the largest difference between the numbers of two ranks."""
    return max(by_rank.values()) - min(by_rank.values())


def known_numbers(by_rank: Mapping[int, object], ranks: Collection[int]) -> dict[int, float]:
    """Return the finite numbers by rank; empty if one of the ranks has no number."""
    numbers = {}
    for rank, value in by_rank.items():
        # True and False are integers in Python.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if math.isfinite(value):
            numbers[rank] = float(value)
    expected_ranks = set(ranks)
    return numbers if numbers.keys() >= expected_ranks else {}


def counts_of(diff: TensorDiff) -> dict[int, float]:
    """Return the value of a single-element tensor by rank; empty unless all values are known."""
    return known_numbers(evidence_of(diff).values, join_ranks(diff.clusters))
