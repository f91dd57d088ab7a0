"""Evidence on the step at which a difference began: stale ranks, and the optimizer's step counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import ranks_by
from syncheck.diagnose.counters import counts_of, farthest, scales_of
from syncheck.kinds import OPTIMIZER
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Case
    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import Comparison


class Origin(Sentence):
    """Statements about the step at which a difference began."""

    STALE = "at step {step} {ranks:ranks} {ranks:verb was|were} bitwise equal to the other ranks at step {earlier}"
    COUNTERS = (
        "{counters:count optimizer step counter} {counters:verb differs|differ}, by {lag:count step}: {steps:by_rank}"
    )


def stale_at_first(case: Case) -> Comparison | None:
    """Return the first group since which parameters have differed at every step, if ranks were stale in it.

    Without a series this is the group of the case. A difference from before a step in sync has another cause.
    """
    first = None
    for group in reversed(case.series):
        if not any(diff.kind == "parameter" and diff.out_of_sync for diff in group.tensors):
            break
        first = group
    return first if first is not None and first.evidence.stale else None


def ran_forward(group: Comparison) -> bool | None:
    """Whether stale ranks ran the forward pass, by BatchNorm's counts. None without BatchNorm."""
    if not sum(counts.compared for kind, counts in group.kinds.items() if kind == "bn_count"):
        return None
    return not any(diff.kind == "bn_count" and diff.out_of_sync for diff in group.tensors)


def only_skipped(group: Comparison) -> bool:
    """Whether stale ranks ran the forward pass and skipped the optimizer step: parameters and state are old.

    After an early parameter gather the parameters are old and the optimizer state is new. If loss scales differ, an
    overflow caused the skipped step, which is SYN216.
    """
    old_state = any(diff.kind in OPTIMIZER and diff.out_of_sync for diff in group.tensors)
    return bool(group.evidence.stale) and old_state and ran_forward(group) is True and not scales_of(group)


def stale_facts(group: Comparison) -> tuple[Message, ...]:
    """State which ranks were bitwise equal to the other ranks at which earlier step."""
    ranks_of = ranks_by(dict(sorted(group.evidence.stale.items())))
    return tuple(
        Origin.STALE(step=group.step, ranks=tuple(ranks), earlier=earlier) for earlier, ranks in ranks_of.items()
    )


def counter_facts(counters: Sequence[StepCounter]) -> tuple[Message, ...]:
    """State how many step counters differ, and the counts of the counter with the largest lag; empty without any."""
    most = farthest(counters)
    if most is None:
        return ()
    return (Origin.COUNTERS(counters=len(counters), lag=int(most.lag), steps=steps_by_rank(most)),)


def steps_by_rank(counter: StepCounter) -> dict[int, int]:
    """Return the number of steps that each rank counted."""
    return {rank: int(count) for rank, count in sorted(counter.by_rank.items())}


def earlier_lag(counter: StepCounter, series: Sequence[Comparison]) -> tuple[int, int] | None:
    """Return the first step at which the counter differed and its lag there; None if the lag has not changed."""
    for group in series[:-1]:
        for diff in group.tensors:
            counts = counts_of(diff) if diff.name == counter.name else {}
            if counts and group.step is not None:
                lag = max(counts.values()) - min(counts.values())
                return None if lag == counter.lag else (group.step, int(lag))
    return None
