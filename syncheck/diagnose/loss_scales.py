"""The states of loss scalers: their scales, and whether overflows explain skipped steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.diagnose.rank_values import are_unequal, below_highest, counts_of, find_minority, known_numbers
from syncheck.diagnose.selection import last_part, select_kinds
from syncheck.tensors.value_kinds import SCALES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.diagnose.counters import StepCounter
    from syncheck.diagnose.selection import Diff
    from syncheck.records import Comparison


def scales_of(group: Comparison) -> dict[int, float]:
    """Return the loss scale by rank; empty unless it differs and is known on every rank."""
    values = _select_scales(group.values)
    if values:
        by_rank = values[0].by_rank
        return known_numbers(by_rank, by_rank.keys())
    tensors = _select_scales(group.tensors)
    return counts_of(tensors[0]) if tensors else {}


def _select_scales(diffs: Iterable[Diff]) -> list[Diff]:
    """Return the scales of loss scalers. The other state of a scaler counts steps."""
    states = select_kinds(diffs, "scaler")
    return [diff for diff in states if last_part(diff.name) in SCALES]


def scaler_explains(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether overflows explain the lag: each overflow skips a step and halves the loss scale."""
    scales = scales_of(case.group)
    lowest = min(scales.values(), default=0.0)
    if lowest <= 0:
        return False
    # Each overflow halves the scale.
    overflows = math.log2(max(scales.values()) / lowest)
    ranks_with_overflows = set(below_highest(scales))
    for counter in counters:
        # The lagging ranks must have a lower scale.
        if not ranks_with_overflows.issuperset(counter.behind):
            return False
        # For a large lag, the scale must have been halved at least as often.
        if counter.far and counter.lag > overflows:
            return False
    return True


def find_scaler_values(case: Case, ranks: Collection[int] = ()) -> tuple[str, ...]:
    """Return the names of differing, uncovered loss scaler values, because the scaler counts steps too.

    ranks: return only values with a minority within this set of ranks.
    """
    # Without a set, the minority may be any ranks.
    possible_ranks = frozenset(ranks or case.group.ranks)
    names = []
    for value in case.of_values("scaler"):
        # A missing value does not differ.
        numbers = [str(number) for number in value.by_rank.values() if number is not None]
        if are_unequal(numbers):
            minority = find_minority(value.by_rank)
            if possible_ranks.issuperset(minority):
                names.append(value.name)
    return tuple(names)
