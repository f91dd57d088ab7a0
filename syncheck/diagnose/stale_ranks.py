"""Ranks with the values of an earlier step: since when, and whether they skipped a step or were set back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.counters import Origin
from syncheck.diagnose.loss_scales import scales_of
from syncheck.diagnose.selection import out_of_sync
from syncheck.tensors.kinds import OPTIMIZER
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.messages import Message
    from syncheck.records import Comparison


def stale_at_first(case: Case) -> Comparison | None:
    """Return the first group since which parameters have differed at every step, if ranks were stale in it.

    Without a series this is the group of the case.
    """
    first: Comparison | None = None
    for group in reversed(case.series):
        # A difference from before a step in sync has another cause.
        if not out_of_sync(group, "parameter"):
            break
        first = group
    was_stale = first is not None and bool(first.evidence.stale)
    return first if was_stale else None


def ran_forward(group: Comparison) -> bool | None:
    """Whether stale ranks ran the forward pass, by BatchNorm's counts. None without BatchNorm."""
    is_compared = "bn_count" in group.compared_kinds
    return not out_of_sync(group, "bn_count") if is_compared else None


def only_skipped(group: Comparison) -> bool:
    """Whether stale ranks ran the forward pass and skipped the optimizer step: parameters and state are old."""
    conditions = (
        bool(group.evidence.stale),
        # After an early parameter gather the parameters are old and the optimizer state is new.
        bool(out_of_sync(group, *OPTIMIZER)),
        # If loss scales differ, an overflow caused the skipped step, which is SYN216.
        not scales_of(group),
        ran_forward(group) is True,
    )
    return all(conditions)


def stale_facts(group: Comparison) -> tuple[Message, ...]:
    """State which ranks were bitwise equal to the other ranks at which earlier step."""
    facts = []
    stale_ranks = dict(sorted(group.evidence.stale.items()))
    ranks_of_steps = group_ranks(stale_ranks)
    for earlier, ranks in ranks_of_steps.items():
        fact = Origin.STALE(
            step=group.step,
            ranks=tuple(ranks),
            earlier=earlier,
        )
        facts.append(fact)
    return tuple(facts)
