"""Replicas differ in a way that no rule explains.

Signature: what is left when every other rule has taken what it fits. The finding says what the evidence does tell:
state of the optimizer that is apart alone, buffers, parameters whose
gradients are equal by now, or digests that cannot say by how much.

Cause: not known. The most common reasons for differing parameters are gradients that were not reduced, a model that
was not broadcast before training, and state that was loaded on some ranks only.

Fix: look at which ranks agree and which tensors differ (`--format json` lists them all), and save at two early steps:
a difference that stays constant comes from the start, one that grows comes from every step.

Incidents: a report with the JSON attached is welcome: every rule here began as an unexplained difference.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, counted, differ, gap_text, ranks_by
from syncheck.diagnose.gradients import cosines, course, moments_apart, only_decay
from syncheck.errors import brief
from syncheck.evidence.suspects import suspects
from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity, ValueDiff

CODE = "SYN299"
SLUG = "unexplained-difference"
SEVERITY: Severity = "error"
CAUSE = (
    "No rule explains this difference. Often gradients were not reduced, the initial model was not broadcast, "
    "or state was loaded on some ranks only."
)
FIX = (
    "See which ranks agree, and compare two early steps: a constant difference comes from the start, a "
    "growing one from every step."
)

# Cause and fix by what the evidence tells, in the place of those above.
STATE_ALONE = (
    "Only the optimizer's state differs: loaded, reset or averaged on some ranks only, or kept by each for itself.",
    "Load the optimizer's state on every rank; where models are averaged, average or reset it on every rank too.",
)
BUFFERS = (
    "Only buffers differ: each rank updates them from its own data, or they were loaded on some ranks only.",
    "all_reduce what the buffers are updated from, on every rank, before updating them.",
)
EVENT = (
    "The gradients are equal by now: parameters were edited, loaded, or updated at another rate on some ranks only.",
    "See what the suspects did besides optimizer.step() since they last agreed, and whether all have one rate.",
)
AVERAGED = (
    "The first moments are nearly alike, so gradients are averaged: a rank left a step out or lost its own momentum.",
    "Look for steps left out (a bad batch, an overflow) and for state loaded on some ranks; AdamW's counters tell.",
)
DIGESTS = (
    "Digests tell that bytes differ, not by how much or in which direction, and no rule fits that alone.",
    "Compare the checkpoints themselves, not their fingerprints or stored checksums; in a job, with a larger budget=.",
)
# Median cosine of first moments from which gradients count as the same.
ALIKE = 0.9


def apply(case: Case) -> Match | None:
    """Cover all that is left."""
    if not case.tensors and not case.values:
        return None
    parts = []
    if case.tensors:
        by_kind = Counter(diff.kind for diff in case.tensors)
        kinds = ", ".join(counted(count, f"{kind} tensor") for kind, count in by_kind.items())
        parts.append(
            f"{kinds} {differ(len(case.tensors))}, {gap_text(case.tensors)}{agreement_text(case.tensors, case.group)}"
        )
    if case.values:
        differing = case.of_values()
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        parts.append(f"values differ: {', '.join(map(_value_text, differing[:3]))}{more}")
    cause, fix, told = _told(case)
    if told:
        parts.append(told)
    return Match(case.tensors, _ranks(case), "; ".join(parts), case.values, cause, fix)


def _told(case: Case) -> tuple[str, str, str]:
    """Return cause, fix and a word of evidence, as far as they are known; '' for each that is not."""
    kinds = {diff.kind for diff in case.tensors}
    moments = cosines(moments_apart(case).values())
    if not case.tensors:
        return "", "", ""
    since = course(case, *({"parameter"} & kinds or kinds))[1].removeprefix("; ")
    if all(diff.mismatched is None and diff.reason for diff in case.tensors):
        return (*DIGESTS, since)
    if kinds <= {"optimizer"} and case.compared("parameter") and case.agrees("parameter"):
        return (*STATE_ALONE, since or "all parameters agree")
    if kinds <= {"buffer"}:
        return (*BUFFERS, since)
    if "parameter" not in kinds:
        return "", "", since
    if (case.compared("optimizer") and case.agrees("optimizer")) or only_decay(case):
        return (*EVENT, since)
    if moments and median(moments) >= ALIKE:
        return (*AVERAGED, f"median cosine of the first moments {median(moments):.3f}{'; ' * bool(since)}{since}")
    return "", "", since


def _value_text(diff: ValueDiff) -> str:
    """'optimizer.param_groups.0.lr (0.1 on ranks 0, 1; 0.2 on rank 2)'."""
    by_value = ranks_by({rank: brief(value) for rank, value in diff.by_rank.items()})
    if len(by_value) > 4:
        return diff.name
    return f"{diff.name} ({'; '.join(f'{value} on {ranks_text(ranks)}' for value, ranks in by_value.items())})"


def _ranks(case: Case) -> tuple[int, ...]:
    """Return the suspects of the tensors, or, where values differ alone, the ranks outside their majority."""
    if case.tensors:
        return suspects(case.tensors, case.group)
    odd: set[int] = set()
    for diff in case.of_values():
        most = max(ranks_by({rank: brief(value) for rank, value in diff.by_rank.items()}).values(), key=len)
        odd |= set(diff.by_rank).difference(most if 2 * len(most) > len(diff.by_rank) else ())
    return tuple(sorted(odd)) or case.group.ranks
