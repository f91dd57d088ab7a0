"""Where a difference began, as far as stale ranks tell: a rank that was once where the others had been before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import ranks_by
from syncheck.diagnose.counters import scales_of
from syncheck.kinds import OPTIMIZER
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison


def stale_at_first(case: Case) -> Comparison | None:
    """Return the group since which parameters have differed at every step, if ranks were stale in it; else None.

    Without a series that is this group itself. What was in sync in between has another cause.
    """
    first = None
    for group in reversed(case.series):
        if not any(diff.kind == "parameter" and diff.out_of_sync for diff in group.tensors):
            break
        first = group
    return first if first is not None and first.evidence.stale else None


def ran_forward(group: Comparison) -> bool | None:
    """Whether ranks that are stale ran the forwards all the same, as BatchNorm counts them; None where nothing does."""
    if not sum(counts.compared for kind, counts in group.kinds.items() if kind == "bn_count"):
        return None
    return not any(diff.kind == "bn_count" and diff.out_of_sync for diff in group.tensors)


def only_skipped(group: Comparison) -> bool:
    """Whether stale ranks ran the forward, and left out what the optimizer does: parameters and its state are old.

    A parameter gather that came too early leaves old parameters beside the optimizer's new state. Where the ranks'
    loss scales differ, the step was left out for an overflow, and that is the scaler's matter.
    """
    old_state = any(diff.kind in OPTIMIZER and diff.out_of_sync for diff in group.tensors)
    return bool(group.evidence.stale) and old_state and ran_forward(group) is True and not scales_of(group)


def stale_text(group: Comparison) -> str:
    """Say which ranks were where: 'at step 6 rank 1 was, to the byte, where the others were at step 5'."""
    places = ", ".join(
        f"{ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'}, to the byte, where the others were at step {step}"
        for step, ranks in ranks_by(dict(sorted(group.evidence.stale.items()))).items()
    )
    return f"at step {group.step} {places}"
