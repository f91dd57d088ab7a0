"""Two models differ, and no rule explains why.

Signature: all differences between A and B that no other rule covers.

Cause: unknown. The most common causes: B was made from another step or another run, a conversion changed values, or
training went on after B was saved.

Fix: check the step and the run of both models. A few tensors that differ point to the code that converts them; if all
tensors differ, the models are different.

Incidents: please send a report with the JSON attached.
"""

from __future__ import annotations

from collections import Counter

from syncheck.diagnose.case import Case, Match, OtherCode, largest_difference, limit_facts
from syncheck.messages import Message, Sentence
from syncheck.tensors.names import is_code_constant

CODE = "SYN399"
SLUG = "unexplained-model-difference"
SEVERITY = "error"
CERTAINTY = "consistent"
_MOST = 3  # values with their two sides


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "No rule explains this difference. Often B was made from another step or another run, or a conversion changed "
        "values."
    )
    FIX = (
        "Check the step and the run of both models. If only some tensors differ, look at the code that converts or "
        "saves them. If a conversion to another dtype rounded the values, pass {cast:option DTYPE}."
    )
    CAUSE_NOT_FINITE = (
        "NaN or infinity is in one of the models only: a conversion or a merge overflowed, divided by zero, or read "
        "damaged weights, or the training of one model diverged."
    )
    FIX_NOT_FINITE = (
        "Look for the listed elements in the code that converts or merges the weights: overflow in float16, scales of "
        "zero, and factors with NaN. Then compare the remaining differences again."
    )
    NOT_FINITE = "the number of NaN and infinite elements in {name} is {values:by_rank}"
    MORE_NOT_FINITE = "{count:count more tensor} with another number of them"
    TENSORS = "{count:count tensor} {count:verb differs|differ} ({kinds:list}), {size}"
    KIND = "{count} {kind}"
    AGREE = "all {count:count other tensor} {count:verb agrees|agree}"
    VALUE = "{name} is {values:by_rank}"
    MORE_VALUES = "{count:count more value} {count:verb differs|differ}"


def apply(case: Case) -> Match | None:
    """Match all remaining differences."""
    if not case.tensors and not case.values:
        return None
    facts: list[Message] = []
    if case.tensors:
        by_kind = Counter(diff.kind for diff in case.tensors)
        kinds = tuple(Text.KIND(count=count, kind=kind) for kind, count in by_kind.items())
        facts.append(Text.TENSORS(count=len(case.tensors), kinds=kinds, size=largest_difference(case.tensors)))
        if agreeing := case.group.counts.identical + case.group.counts.equal:
            facts.append(Text.AGREE(count=agreeing))
    if case.values:
        values = [Text.VALUE(name=diff.name, values=dict(diff.by_rank)) for diff in case.of_values()]
        facts += limit_facts(values, _MOST, Text.MORE_VALUES)
    overflows = [diff for diff in case.tensors if len(set(diff.nonfinite.values())) > 1]
    counts = [Text.NOT_FINITE(name=diff.name, values=dict(diff.nonfinite)) for diff in overflows]
    facts += limit_facts(counts, _MOST, Text.MORE_NOT_FINITE)
    cause, fix = _choose_cause(case, has_overflow=bool(overflows))
    return Match(case.tensors, case.group.ranks, facts, case.values, cause, fix)


def _choose_cause(case: Case, *, has_overflow: bool) -> tuple[Sentence | None, Sentence | None]:
    """Return cause and fix; None for any other difference."""
    if has_overflow:
        return Text.CAUSE_NOT_FINITE, Text.FIX_NOT_FINITE
    if case.tensors and all(is_code_constant(diff.name) for diff in case.tensors):
        return OtherCode.CAUSE, OtherCode.FIX
    return None, None
