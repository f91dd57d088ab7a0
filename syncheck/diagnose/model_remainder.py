"""SYN399: the differences of two models that no rule explains, with all that is known about them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.measures import count_mismatched, is_partly_nonfinite, parameters_of, relation_of
from syncheck.diagnose.ranges import list_ranges
from syncheck.diagnose.rule import MOST_FACTS
from syncheck.diagnose.statements import OtherCode, largest_difference, limit_facts
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence
from syncheck.tensors.names import is_code_constant

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

# Statements with the values of both sides.
_MOST_VALUES = 3


class Unexplained(Sentence, topic="SYN399"):
    """Two models differ, and no rule explains why.

    Signature: all differences between A and B that no other rule covers. If rows, columns or other indices of a tensor
    have one value in one model only, the evidence states the range and the value.

    Cause: unknown. The most common causes: B was made from another step or another run, a conversion changed values, or
    training went on after B was saved. Rows with one value were often never written: a shard or a part of a fused
    tensor is missing. Pruning, masks and rows of padding leave the same bytes.

    Fix: check the step and the run of both models. A few tensors that differ point to the code that converts them; if
    all tensors differ, the models are different.

    Incidents: please send a report with the JSON attached.
    """

    CAUSE = (
        "No rule explains this difference. Often B was made from another step or another run, or a conversion changed "
        "values."
    )
    FIX = (
        "Check the step and the run of both models. If only some tensors differ, look at the code that converts or "
        "saves them. If a conversion to another dtype rounded the values, pass {cast:option DTYPE}."
    )
    FIX_AFTER_CAST = (
        "Check the step and the run of both models. If only some tensors differ, look at the code that converts or "
        "saves them. The conversion with {cast:option} does not explain these tensors."
    )
    CAUSE_NOT_FINITE = (
        "NaN or infinity is in one model only: a conversion or a merge overflowed, divided by zero, or read "
        "damaged weights, or the training of one model diverged."
    )
    FIX_NOT_FINITE = (
        "Look for the listed elements in the code that converts or merges the weights: overflow in float16, scales of "
        "zero, and factors with NaN. Then compare the remaining differences again."
    )
    CAUSE_CONSTANT = (
        "Parts of the tensors have a single value in one model: a shard or a part of a fused tensor was not "
        "written or loaded, or the part was pruned, masked or padded."
    )
    FIX_CONSTANT = (
        "Check which shard or part of the listed range the conversion joins or loads there. If the part was pruned or "
        "masked on purpose, change A in the same way, and compare again."
    )
    CONSTANT = "{ranges:list} of {name} {count:verb is|are} all {value:number} in {side}"
    MORE_CONSTANT = "{count:count more tensor} with such parts"
    NOT_FINITE = "of {numel} elements of {name}, {values:by_rank} are NaN or infinite"
    MORE_NOT_FINITE = "{count:count more tensor} with another number of them"
    TENSORS = "{count:count tensor} {count:verb differs|differ} ({kinds:list}), {size}"
    KIND = "{count} {kind}"
    AGREE = "all {count:count other tensor} {count:verb agrees|agree}"
    VALUE = "{name} is {values:by_rank}"
    MORE_VALUES = "{count:count more value} {count:verb differs|differ}"


def match_remaining(case: Case) -> Match | None:
    """Match all remaining differences."""
    if not case.tensors and not case.values:
        return None
    overflows = _state_overflows(case)
    facts = [
        # No size of a difference shows as much as NaN or infinity in one model.
        *limit_facts(overflows, _MOST_VALUES, Unexplained.MORE_NOT_FINITE),
        *_summarize_tensors(case),
        *limit_facts(_state_values(case), _MOST_VALUES, Unexplained.MORE_VALUES),
    ]
    constant = case.related(RelationKind.CONSTANT_PART)
    facts += limit_facts(list(map(_state_constant_part, constant)), MOST_FACTS, Unexplained.MORE_CONSTANT)
    match = Match(
        tensors=case.tensors,
        ranks=case.group.ranks,
        facts=facts,
        values=case.values,
        # An option that the user has passed is no fix.
        fix=Unexplained.FIX_AFTER_CAST if case.group.evidence.cast else None,
    )
    if overflows:
        return match.with_cause(Unexplained.CAUSE_NOT_FINITE, Unexplained.FIX_NOT_FINITE)
    are_constants = all(is_code_constant(diff.name) for diff in case.tensors)
    if case.tensors and are_constants:
        return match.with_cause(OtherCode.CAUSE, OtherCode.FIX)
    # Other differences have another cause.
    if case.tensors and all(map(_is_constant_part, case.tensors)):
        return match.with_cause(Unexplained.CAUSE_CONSTANT, Unexplained.FIX_CONSTANT)
    return match


def _is_constant_part(diff: TensorDiff) -> bool:
    """Whether a tensor differs only in indices that have one value in one model."""
    if relation_of(diff) is not RelationKind.CONSTANT_PART:
        return False
    parameters = parameters_of(diff)
    lengths = parameters["runs"][1::2]
    elements_of_index = diff.numel // diff.shape[parameters["dim"]]
    return bool(count_mismatched(diff) <= sum(lengths) * elements_of_index)


def _state_constant_part(diff: TensorDiff) -> Message:
    """State which indices of a tensor have one value in one model only."""
    parameters = parameters_of(diff)
    return Unexplained.CONSTANT(
        ranges=list_ranges(diff),
        name=diff.name,
        value=parameters["value"],
        count=sum(parameters["runs"][1::2]),
        side=parameters["side"],
    )


def _state_values(case: Case) -> list[Message]:
    """State the differing Python values of both models."""
    facts = []
    for value in case.of_values():
        fact = Unexplained.VALUE(name=value.name, values=dict(value.by_rank))
        facts.append(fact)
    return facts


def _state_overflows(case: Case) -> list[Message]:
    """State how many elements are not finite, for tensors with another number of them in each model."""
    facts = []
    for diff in case.tensors:
        if is_partly_nonfinite(diff):
            facts.append(Unexplained.NOT_FINITE(name=diff.name, numel=diff.numel, values=dict(diff.nonfinite)))
    return facts


def _summarize_tensors(case: Case) -> list[Message]:
    """State how many tensors of each kind differ, by how much, and how many agree; empty without tensors."""
    if not case.tensors:
        return []
    kinds = []
    for kind, count in Counter(diff.kind for diff in case.tensors).items():
        kinds.append(Unexplained.KIND(count=count, kind=kind))
    summary = Unexplained.TENSORS(
        count=len(case.tensors),
        kinds=tuple(kinds),
        size=largest_difference(case.tensors),
    )
    facts = [summary]
    agreeing = case.group.counts.identical + case.group.counts.equal
    if agreeing:
        facts.append(Unexplained.AGREE(count=agreeing))
    return facts
