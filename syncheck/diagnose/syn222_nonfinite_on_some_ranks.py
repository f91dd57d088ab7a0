"""Some ranks hold NaN or infinity where others hold numbers.

Signature: the replicas of a tensor that differs hold unlike numbers of elements that are not finite. This comes before
the rules of single elements (SYN220), sub-trees (SYN212) and scale (SYN213), whose numbers mean nothing then.

Cause: an overflow, a bad batch, a corrupt load or a failing device on that rank alone. Averaged gradients carry a NaN
to every rank at the next step, and soon all hold the same NaNs, which is in sync. So where few elements are concerned,
it happened after the last averaged step; where all of a rank's parameters are, its gradients are not averaged. With a
loss scaler it can stay where it is: every later step is left out on all ranks.

Fix: check before the step, together, and skip or stop on all ranks alike:
`ok = loss.detach().isfinite().float(); dist.all_reduce(ok, dist.ReduceOp.MIN)`. Resume from the last checkpoint
whose ranks agree; look after the device if it happens again.

Incidents: NVIDIA/Megatron-LM#5281 (NaN three steps after one rank loaded a corrupt checkpoint),
hiyouga/LLaMA-Factory#10820 (buffers that were never restored on the ranks other than 0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, TensorDiff

CODE = "SYN222"
SLUG = "nonfinite-on-some-ranks"
SEVERITY: Severity = "error"
CAUSE = (
    "One rank alone met an overflow, a bad batch, a corrupt load or a failing device, after the last step whose "
    "gradients were averaged: such a step takes NaNs to all ranks."
)
FIX = (
    "Check together before each step: ok = loss.detach().isfinite().float(); "
    "dist.all_reduce(ok, dist.ReduceOp.MIN); where ok is 0, skip or stop on all ranks. Resume from files that agree."
)
IN_A_JOB = (
    f"{FIX.partition(' Resume ')[0]} To go on with this run: syncheck.live.resync(model, optimizer) on all ranks, with "
    "source=RANK where there is no majority."
)


def apply(case: Case) -> Match | None:
    """Fit tensors of which some replicas hold more infinities and NaNs; these are the suspects."""
    fitted = {diff.name: (diff, odd) for diff in case.tensors if (odd := _more(diff))}
    if not fitted:
        return None
    ranks = tuple(sorted({rank for _, odd in fitted.values() for rank in odd}))
    first, odd = next(iter(fitted.values()))
    worst = max(first.nonfinite[rank] for rank in odd)
    verb = "holds" if len(fitted) == 1 else "hold"
    text = (
        f"{counted(len(fitted), 'tensor')} {verb} more NaNs and infinities on {ranks_text(ranks)}: "
        f"{worst} of {counted(first.numel, 'element')} of {first.name} on {ranks_text(odd)}, "
        f"{min(first.nonfinite.values()) or 'none'} elsewhere"
    )
    whole = [diff for diff, _ in fitted.values() if diff.kind == "parameter" and _everywhere(diff)]
    if 2 * len(whole) > case.compared("parameter"):
        text += f"; {len(whole)} parameters hold nothing else there, so gradients have not been averaged since"
    tensors = tuple(diff for diff, _ in fitted.values())
    fix = IN_A_JOB if case.in_memory else ""
    return Match(tensors, ranks, text + agreement_text(tensors, case.group), fix=fix)


def _more(diff: TensorDiff) -> tuple[int, ...]:
    """Return the ranks with more of them than another that ought to hold the same bytes."""
    found: set[int] = set()
    for group in diff.replica_groups or (tuple(diff.nonfinite),):
        counts = {rank: diff.nonfinite[rank] for rank in group if rank in diff.nonfinite}
        found |= {rank for rank, count in counts.items() if count > min(counts.values())}
    return tuple(sorted(found))


def _everywhere(diff: TensorDiff) -> bool:
    return max(diff.nonfinite.values()) == diff.numel
