"""The states of loss scalers: their scales, and whether overflows explain skipped steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.diagnose.rank_values import are_unequal, below_highest, counts_of, find_minority, known_numbers
from syncheck.diagnose.selection import last_part
from syncheck.tensors.value_kinds import SCALES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import Comparison


def scales_of(group: Comparison) -> dict[int, float]:
    """Return the loss scale by rank; empty unless it differs and is known on every rank."""
    for value in group.values:
        if _is_scale(value.name, value.kind):
            return known_numbers(value.by_rank, value.by_rank.keys())
    for diff in group.tensors:
        if _is_scale(diff.name, diff.kind):
            return counts_of(diff)
    return {}


def _is_scale(name: str, kind: str) -> bool:
    """Whether a value or a tensor is the scale of a loss scaler. Its other state counts steps."""
    return kind == "scaler" and last_part(name) in SCALES


def scaler_explains(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether overflows explain the lag: each overflow skips a step and halves the loss scale."""
    scales = scales_of(case.group)
    if not scales or min(scales.values()) <= 0:
        return False
    # Each overflow halves the scale.
    overflows = math.log2(max(scales.values()) / min(scales.values()))
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
    names = []
    for value in case.of_values("scaler"):
        # A missing value does not differ.
        numbers = [str(number) for number in value.by_rank.values() if number is not None]
        if not are_unequal(numbers):
            continue
        minority = find_minority(value.by_rank)
        if not ranks or set(ranks).issuperset(minority):
            names.append(value.name)
    return tuple(names)
