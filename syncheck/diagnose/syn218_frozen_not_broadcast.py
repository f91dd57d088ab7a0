"""Only frozen parameters or plain buffers differ: nothing sent them, and nothing updates them.

Signature: all parameters that differ are frozen: recorded so in the metadata, or without state in an optimizer that
holds state of others; or no parameter differs and plain buffers do. All that is trained agrees, and so does the
optimizer. Over several steps the gap stays as it is; one that changes is of a buffer that each rank updates from its
own data, and is not this.

Where an optimizer's ids cannot be resolved to names, as in a plain `torch.save` of a model with frozen parts, there
must be room: the parameters that differ and the states together may be no more than all parameters.

Cause: DDP sends rank 0's parameters and buffers when it wraps a model. What is not under a wrapper (a module without
trainable parameters is often left out), what `to_empty` or a random initializer fills after the wrap, and buffers
under `broadcast_buffers=False` keep each rank's own numbers for ever. Gradients are averaged through unequal layers.

Fix: after building the model, send what the wrapper does not: `torch.distributed.broadcast(tensor, 0)` for each
frozen parameter and buffer, or build it from one seed, or load it on every rank.

Incidents: speechbrain/speechbrain#2814, pytorch/pytorch#111138 (buffers since `broadcast_buffers=False` stops their
first broadcast too), pytorch/pytorch#178569, pytorch/pytorch#108331 (buffers left as garbage on other nodes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text
from syncheck.diagnose.gradients import (
    course,
    followers_text,
    in_step,
    moments_apart,
    touched_less,
    with_moment,
)
from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import names_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN218"
SLUG = "frozen-not-broadcast"
SEVERITY: Severity = "error"
CAUSE = "Frozen parameters or buffers started unequal, and nothing sends or updates them."
FIX = (
    "Send what the wrapper does not, before training: for t in [*model.parameters(), *model.buffers()]: "
    "torch.distributed.broadcast(t.data, 0). Or load it on every rank, or build it from one seed."
)

# One damaged place is not a tensor with other numbers in it.
WHOLE = 0.5


def apply(case: Case) -> Match | None:
    """Fit frozen parameters that differ alone, or, where all parameters agree, plain buffers."""
    frozen = {diff.name: diff for diff in case.of_kind("parameter") if diff.status == "different"}
    buffers = tuple(diff for diff in case.of_kind("buffer") if diff.status == "different")
    kinds = ("parameter",) if frozen else ("buffer",)
    apart = tuple(frozen.values()) or buffers
    if not apart or not in_step(case) or not case.agrees("optimizer") or moments_apart(case):
        return None
    trend, since = course(case, *kinds)
    if touched_less(apart, WHOLE) or trend not in (None, "constant"):
        return None
    why = _why_frozen(case, frozen) if frozen else f"all {case.compared('parameter')} parameters agree"
    if not why or not (frozen or case.agrees("parameter")):
        return None
    of_frozen = "untrained tensor" if case.loose & frozen.keys() else "frozen parameter"
    what = counted(len(apart), of_frozen if frozen else "plain buffer")
    text = f"{what} {differ(len(apart))} ({names_text([diff.name for diff in apart])}), {gap_text(apart)}; {why}{since}"
    if not frozen and trend is None:
        text += "; files of one step do not tell whether they were unequal from the start or follow each rank's data"
    # Running statistics behind an unequal layer differ, as they do for want of a synchronized BatchNorm.
    covered = (*apart, *(case.of_kind(*BN_STATISTICS, "buffer") if frozen else ()))
    text += followers_text(covered, *kinds)
    return Match(covered, suspects(apart, case.group), text + agreement_text(apart, case.group))


def _why_frozen(case: Case, apart: Collection[str]) -> str:
    """Say from what it follows that these parameters are not trained; '' where it does not follow."""
    metadata, optimized = case.group.evidence.metadata, case.optimized
    if set(apart) <= case.frozen:
        return "frozen by the metadata; all others agree"
    if metadata is not None and metadata.optimizer_sharded:
        return ""
    if optimized is not None:
        told = f"the optimizer holds no state of them, and state of {len(optimized)} others, which agree"
        return told if set(apart) <= case.untrained else ""
    states = with_moment(case)
    everything = frozenset(name for name, kind in case.group.evidence.names.items() if kind == "parameter")
    if states and all(name.isdigit() for name in states) and len(states) + len(apart) <= len(everything):
        return (
            f"consistent with frozen ones or buffers, and with trained ones that were overwritten: the optimizer holds "
            f"state of {len(states)} of {len(everything)} parameters, not known which"
        )
    return ""
