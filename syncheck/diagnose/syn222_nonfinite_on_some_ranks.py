"""Some ranks hold NaN or infinity where other ranks hold finite numbers.

Signature: the replicas of a differing tensor have different numbers of NaN or infinite elements. This rule precedes the
rules on single elements (SYN220), sub-trees (SYN212) and scale (SYN213), whose measurements are meaningless with these
values.

Cause: an overflow, a bad batch, uninitialised or corrupt values or a failing device on one rank alone. Averaged
gradients spread NaN to all ranks at the next step; soon all ranks hold the same NaNs, which is in sync. If only a few
elements are affected, the cause was therefore later than the last averaged step, or the loss does not use them. If all
parameters of a rank are affected, it stepped with gradients of its own, or its step itself overflowed. With a loss
scaler the NaN can stay on one rank, because all ranks skip every later step.

Fix: check together before the step, and skip or stop on all ranks: `ok = loss.detach().isfinite().float();
dist.all_reduce(ok, dist.ReduceOp.MIN)`. Resume from the last checkpoint in which the ranks agree. If it happens again,
check the device.

Incidents: NVIDIA/Megatron-LM#5281 (NaN three steps after one rank loaded a corrupt checkpoint),
hiyouga/LLaMA-Factory#10820 (buffers restored on rank 0 only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import state_if
from syncheck.diagnose.features import groups_of
from syncheck.diagnose.selection import select_kinds
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN222"
SLUG = "nonfinite-on-some-ranks"
SEVERITY = "error"
CERTAINTY = "proved"
_CHECK_TOGETHER = (
    "Check on all ranks together before each step: `ok = loss.detach().isfinite().float()`; "
    "`dist.all_reduce(ok, dist.ReduceOp.MIN)`. If `ok` is 0, skip the step or stop on all ranks."
)


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Values became NaN or infinite on some ranks only: an overflow, a bad batch, uninitialised or corrupt values, "
        "or a failing device. No step with averaged gradients has spread them since."
    )
    FIX = f"{_CHECK_TOGETHER} Resume from checkpoints in which the ranks agree."
    IN_A_JOB = f"{_CHECK_TOGETHER} To continue this run: `syncheck.live.resync(model, optimizer)` on all ranks."
    IN_A_JOB_NO_MAJORITY = (
        f"{_CHECK_TOGETHER} To continue this run: `syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, "
        "with a rank whose values are finite."
    )
    MORE_NONFINITE = (
        "{ranks:Ranks} {ranks:verb holds|hold} more NaN or infinite elements than the other ranks, in "
        "{tensors:count tensor}"
    )
    ELEMENTS = (
        "{most} of {numel:count element} of {name:name} {most:verb is|are} not finite on {ranks:ranks}, {least} "
        "elsewhere"
    )
    NOTHING_ELSE = (
        "{count:count parameter} {count:verb has|have} no finite element there, as after a step with gradients of one "
        "rank"
    )


def apply(case: Case) -> Match | None:
    """Match tensors with more NaN or infinite elements on some ranks, which are the suspects."""
    affected = []
    ranks: set[int] = set()
    for diff in case.tensors:
        ranks_with_more = _ranks_with_more(diff)
        if ranks_with_more:
            affected.append(diff)
            ranks.update(ranks_with_more)
    if not affected:
        return None

    # A step with the gradients of one rank makes whole parameters NaN.
    without_finite = list(filter(_has_no_finite_element, select_kinds(affected, "parameter")))
    are_most = 2 * len(without_finite) > case.compared("parameter")
    facts = [
        Text.MORE_NONFINITE(tensors=len(affected), ranks=tuple(sorted(ranks))),
        _describe_elements(affected[0]),
        *state_if(are_most, Text.NOTHING_ELSE(count=len(without_finite))),
        *case.agreement_facts(affected),
    ]
    return Match(tuple(affected), tuple(sorted(ranks)), facts)


def _describe_elements(diff: TensorDiff) -> Message:
    """State how many elements of a tensor are not finite on the suspects and elsewhere."""
    ranks = _ranks_with_more(diff)
    return Text.ELEMENTS(
        name=diff.name,
        most=max(diff.nonfinite[rank] for rank in ranks),
        numel=diff.numel,
        ranks=ranks,
        least=min(diff.nonfinite.values()),
    )


def _ranks_with_more(diff: TensorDiff) -> tuple[int, ...]:
    """Return the ranks with more NaN or infinite elements than another rank of the replica group."""
    ranks: set[int] = set()
    for group in groups_of(diff, diff.nonfinite):
        counts = {rank: diff.nonfinite[rank] for rank in group if rank in diff.nonfinite}
        # NaNs on all ranks are in sync, so only additional ones count.
        fewest = min(counts.values(), default=0)
        ranks.update(rank for rank, count in counts.items() if count > fewest)
    return tuple(sorted(ranks))


def _has_no_finite_element(diff: TensorDiff) -> bool:
    """Whether all elements are NaN or infinite on some rank."""
    return max(diff.nonfinite.values()) == diff.numel
