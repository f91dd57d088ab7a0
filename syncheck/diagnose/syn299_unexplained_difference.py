"""Replicas differ, and no rule explains why.

Signature: all differences not covered by another rule. The finding still reports the available evidence: only optimizer
state or buffers differ, the gradients are equal now, or only digests were compared.

Cause: unknown. The most common causes of differing parameters: gradients were not reduced, the initial model was not
broadcast, or only some ranks loaded state.

Fix: check which ranks agree and which tensors differ (`--format json` lists all), and save at two early steps. A
constant difference comes from the start of the run, a growing difference from every step.

Incidents: please send a report with the JSON attached. Every rule began as an unexplained difference.
"""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, cosines, largest_difference, limit_facts
from syncheck.diagnose.history import suspects
from syncheck.messages import Message, Sentence
from syncheck.records import group_ranks
from syncheck.tensors.names import is_code_constant
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import ValueDiff

CODE = "SYN299"
SLUG = "unexplained-difference"
SEVERITY = "error"
CERTAINTY = "consistent"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "No rule explains this difference. Often gradients were not reduced, the initial model was not broadcast, or "
        "only some ranks loaded state."
    )
    CAUSE_CODE = (
        "Constants in the code of the TorchScript archives differ: the models were traced or scripted from other code, "
        "or with other inputs."
    )
    FIX_CODE = (
        "Trace or script the models from one version of the code, with the same inputs. Register values that belong to "
        "the model as buffers."
    )
    FIX = (
        "Check which ranks agree, and compare two early steps: a constant difference comes from the start of the run, "
        "a growing difference from every step."
    )
    CAUSE_STATE = (
        "Only the optimizer state differs: it was loaded, reset or averaged on some ranks only, or each rank keeps its "
        "own."
    )
    FIX_STATE = "Load the optimizer state on every rank. If models are averaged, average or reset it on every rank too."
    CAUSE_BUFFERS = "Only buffers differ: each rank updates them from its own data, or only some ranks loaded them."
    FIX_BUFFERS = "Call all_reduce on the inputs of the buffers on every rank before updating them."
    CAUSE_EVENT = (
        "The gradients are equal now: some ranks edited or loaded parameters, or updated them with another learning "
        "rate."
    )
    FIX_EVENT = (
        "Look for code that changes parameters outside optimizer.step() on the suspects, and check that all ranks have "
        "the same learning rate."
    )
    CAUSE_AVERAGED = (
        "The first moments are nearly equal, so gradients are averaged: a rank skipped a step or lost its momentum."
    )
    FIX_AVERAGED = (
        "Look for skipped steps (a bad batch, an overflow) and for state loaded on some ranks only; AdamW's step "
        "counters would show them."
    )
    CAUSE_DIGESTS = (
        "Digests show differing bytes, but neither the size nor the direction of a difference, which the rules require."
    )
    FIX_DIGESTS = (
        "Compare the checkpoints instead of their fingerprints or stored checksums; in a job, use a larger budget=."
    )
    TENSORS = "No rule explains why {count:count tensor} {count:verb differs|differ} ({kinds:list}), {size}"
    KIND = "{count} {kind}"
    VALUES = "No rule explains {count:count differing value}: {values:list}"
    VALUE = "{name} is {values:by_rank}"
    VALUE_NAME = "{name}"
    MORE_VALUES = "{count} more"
    PARAMETERS_AGREE = "all parameters agree"
    MOMENTS = "the median cosine of the first moments is {cosine:.3f}"


# Median cosine from which first moments count as equal.
ALIKE = 0.9
_MOST = 3  # listed values


def apply(case: Case) -> Match | None:
    """Match all remaining differences."""
    if not case.tensors and not case.values:
        return None
    facts: list[Message] = []
    if case.tensors:
        by_kind = Counter(diff.kind for diff in case.tensors)
        kinds = tuple(Text.KIND(count=count, kind=kind) for kind, count in by_kind.items())
        size = largest_difference(case.tensors)
        facts += [Text.TENSORS(count=len(case.tensors), kinds=kinds, size=size)]
        facts += case.agreement_facts(case.tensors)
    if case.values:
        facts.append(_describe_values(case.of_values()))
    cause, fix, more = _diagnose_remainder(case)
    return Match(case.tensors, _ranks(case), (*facts, *more), case.values, cause, fix)


def _diagnose_remainder(case: Case) -> tuple[Sentence | None, Sentence | None, tuple[Message, ...]]:
    """Return cause, fix and evidence by the kinds of the differing tensors; None for an unknown cause or fix."""
    kinds = {diff.kind for diff in case.tensors}
    moments = cosines(case.differing_moments().values())
    if not case.tensors:
        return None, None, ()
    if all(is_code_constant(diff.name) for diff in case.tensors):
        return Text.CAUSE_CODE, Text.FIX_CODE, ()
    since = case.trend_facts(*({"parameter"} & kinds or kinds))[1]
    if all(diff.mismatched is None and diff.reason for diff in case.tensors):
        return Text.CAUSE_DIGESTS, Text.FIX_DIGESTS, since
    if kinds <= {"optimizer"} and case.compared("parameter") and case.agrees("parameter"):
        return Text.CAUSE_STATE, Text.FIX_STATE, since or (Text.PARAMETERS_AGREE(),)
    if kinds <= {"buffer"}:
        return Text.CAUSE_BUFFERS, Text.FIX_BUFFERS, since
    if "parameter" not in kinds:
        return None, None, since
    if (case.compared("optimizer") and case.agrees("optimizer")) or case.only_decay():
        return Text.CAUSE_EVENT, Text.FIX_EVENT, since
    if moments and median(moments) >= ALIKE:
        return Text.CAUSE_AVERAGED, Text.FIX_AVERAGED, (Text.MOMENTS(cosine=median(moments)), *since)
    return None, None, since


def _describe_values(differing: Sequence[ValueDiff]) -> Message:
    """State the first differing values by rank."""
    values = limit_facts([_describe_value(diff) for diff in differing], _MOST, Text.MORE_VALUES)
    return Text.VALUES(count=len(differing), values=tuple(values))


def _describe_value(diff: ValueDiff) -> Message:
    if len(_ranks_by_value(diff)) > 4:
        return Text.VALUE_NAME(name=diff.name)
    return Text.VALUE(name=diff.name, values=dict(diff.by_rank))


def _ranks_by_value(diff: ValueDiff) -> dict[str, list[int]]:
    return group_ranks({rank: brief(value) for rank, value in diff.by_rank.items()})


def _ranks(case: Case) -> tuple[int, ...]:
    """Return the suspects of the tensors. If only values differ, return the ranks outside their majority."""
    if case.tensors:
        return suspects(case.tensors, case.group)
    odd: set[int] = set()
    for diff in case.of_values():
        most = max(_ranks_by_value(diff).values(), key=len)
        odd |= set(diff.by_rank).difference(most if 2 * len(most) > len(diff.by_rank) else ())
    return tuple(sorted(odd)) or case.group.ranks
