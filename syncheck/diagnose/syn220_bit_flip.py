"""A single element differs, and all other elements agree.

Signature: one element of one tensor of the model differs, and possibly the same element of its optimizer state. A
difference in a single bit proves a bit flip, in this file or in the file of an earlier step. If more bits differ, the
finding is consistent with a flip before a later update: averaged gradients move the element equally on all ranks, so
the difference remains. SGD keeps it, and AdamW shrinks it by (1 - lr x weight decay) per step. If weight decay is added
to the gradients (SGD, Adam), it carries the difference to the same element of the moments, and a flip in a first moment
reaches the weight at the next step. An element that a rank clips, masks or edits on its own looks the same.

The finding is likely only if a single bit differs now or differed at an earlier step, and the optimizer state of the
tensor does not differ in the same element: a clipped gradient changes the optimizer state too. Without optimizer state,
the bit must not be among the lowest, because a small change of a value has only a few bits to differ in.

Between two models, a single element beyond a conversion to another dtype is reported as well. A single
bit that changes the sign or the exponent, by a factor of at least 4, is a bit flip even if other tensors were trained.

A difference in a tensor of one element (a step counter, a temperature) is not sufficient, and the rule does not match
if other parameters or states differ too.

Cause: a bit of the rank's memory or of a register flipped (a failing memory cell or core, rarely a particle), or a
single value was overwritten by mistake. If more bits differ, also: gradients or weights clipped by value, a mask or a
hook, on some ranks only. A flip before gradients are averaged reaches all ranks equally, and is invisible here.

Fix: if more bits differ, look first for code that clips, masks or edits elements on some ranks, because a copy of the
values does not repair that. Then copy the parameters and optimizer state of a rank in the majority (load its file), and
test the memory of the host. Without a majority, compare both values with the last checkpoint in sync, or test the
memory of both hosts. If the same rank fails again, exclude the host. If ranks hold different shards, copy only the
damaged tensors, because the checkpoint of another rank has other shards.

Incidents: silent data corruption interrupted Llama 3's training 6 times in 54 days; ByteRobust (arXiv 2509.16293)
isolates the machines outside the dominant group of equal signatures; arXiv 2502.12340 studies 15 faulty nodes.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import select_codes, state_if
from syncheck.diagnose.features import agreeing_along_tensor_parallel, extents_of, hits_of
from syncheck.diagnose.localized import MOST, find_flipped, follower_facts, localized_damage, rest_facts
from syncheck.diagnose.measures import evidence_of, is_at_least, parameters_of
from syncheck.diagnose.selection import has_kind, list_names, out_of_sync, select_names
from syncheck.diagnose.sentences import choose_unsure_fix
from syncheck.diagnose.statements import element_name, index_text
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence
from syncheck.tensors.names import is_code_constant

if TYPE_CHECKING:
    from syncheck.records import Comparison, TensorDiff

CODE = "SYN220"
SLUG = "bit-flip"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "A single value was corrupted on one rank: a bit flipped in memory or in a computation, or the element was "
        "overwritten. Averaged gradients preserve the difference."
    )
    CAUSE_UNSURE = (
        "A single element differs: a bit flipped before a later update, or the element was clipped, masked or edited "
        "on some ranks only."
    )
    FIX_UNSURE = (
        "Look for code that clips, masks or edits gradients or weights on some ranks only. Without such code, test the "
        "memory of the odd host. Then load the checkpoint of a healthy rank on the odd rank: "
        "`model.load_state_dict(torch.load(FILE)['model'])`, and its optimizer state too."
    )
    IN_A_JOB_UNSURE = (
        "Look for code that clips, masks or edits gradients or weights on some ranks only. Without such code, test the "
        "memory of the odd host. Then call `syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, with a "
        "healthy rank."
    )
    FIX_PARTS_UNSURE = (
        "Look for code that clips, masks or edits gradients or weights on some ranks only. Otherwise test the "
        "memory of the odd host. Then copy only the named tensors and optimizer state from the file of a "
        "healthy rank that must hold the same values: "
        "`model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])`. The whole checkpoint has "
        "other shards."
    )
    DIFF_CAUSE = "A single value was changed in one of the models: a bit flipped in memory or on disk."
    DIFF_FIX = "Convert or copy the model again, and test the memory of the host that wrote the odd file."
    FIX = (
        "Load the checkpoint of a rank in the majority on the odd rank: "
        "`model.load_state_dict(torch.load(FILE)['model'])`, and its optimizer state too. Test the memory of the odd "
        "host."
    )
    IN_A_JOB = (
        "Copy the values of a rank in the majority: `syncheck.live.resync(model, optimizer)` on all ranks. "
        "Test the memory of the odd host."
    )
    FIX_PARTS = (
        "Copy only the named tensors and optimizer state from the file of a rank in the majority: "
        "`model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])`. The whole checkpoint has "
        "other shards. Test the memory of the odd host."
    )
    FIX_PARTS_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare both values with the last checkpoint in sync (an exponent bit "
        "changes a value by orders of magnitude), or test the memory of both hosts. Then copy only the named tensors "
        "and optimizer state from the file of the healthy rank: "
        "`model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])`. The whole checkpoint has "
        "other shards."
    )
    FIX_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare both values with the last checkpoint in sync (an exponent bit "
        "changes a value by orders of magnitude), or test the memory of both hosts. Then load the checkpoint of the "
        "healthy rank on the other rank: `model.load_state_dict(torch.load(FILE)['model'])`, and its optimizer state "
        "too."
    )
    IN_A_JOB_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare both values with the last checkpoint in sync (an exponent bit "
        "changes a value by orders of magnitude), or test the memory of both hosts. Then call "
        "`syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, with the healthy rank."
    )
    FLIPPED = "A single bit of {element:name} differs: {bit}"
    FLIPPED_EARLIER = "at step {step} a single bit of {element:name} differed: {bit}"
    BIT = "bit {bit} ({part})"
    INTEGER_BIT = "bit {bit}"
    UNKNOWN_BIT = "its position is unknown"
    ONE_ELEMENT = "One element differs: {element:name}"
    REST_OF_TENSOR = "the {others:count other element} of the tensor {others:verb agrees|agree}"
    VALUES = "the value is {values:by_rank}"
    BITS = "the values differ in {bits:count bit}"
    CONSISTENT = "consistent with a bit flip before a later update, and with an element that was clipped or edited"
    DOUBTFUL = "also consistent with a small change of the value, or with a clipped gradient"
    BESIDE_CAST = (
        "One element of {name:name} differs beyond a conversion to {dtype}: {element:name}, in {bits:count bit}; the "
        "{others:count other element} of the tensor {others:verb agrees|agree}"
    )
    DIFF_CONSISTENT = "more than one bit differs, so the element was overwritten, or updated after a bit flip"


class _Format(NamedTuple):
    """The numbers of bits of a floating-point format, lowest bits first. The sign bit, if any, is the highest."""

    mantissa: int
    exponent: int

    def part_of(self, bit: int) -> str:
        """Return the part of a number that a bit belongs to."""
        if bit < self.mantissa:
            return "mantissa"
        return "exponent" if bit < self.mantissa + self.exponent else "sign"


# By dtype.
_FORMATS = {
    "float64": _Format(52, 11),
    "float32": _Format(23, 8),
    "float16": _Format(10, 5),
    "bfloat16": _Format(7, 8),
    "float8_e4m3fn": _Format(3, 4),
    "float8_e4m3fnuz": _Format(3, 4),
    "float8_e5m2": _Format(2, 5),
    "float8_e5m2fnuz": _Format(2, 5),
    "float8_e8m0fnu": _Format(0, 8),
}
# A change of a value by 2**n rounding steps leaves all bits but one unchanged with a chance of about 1 in 2**n.
_LOW = 6


def apply(case: Case) -> Match | None:
    """Match single elements if nothing else differs."""
    damages = localized_damage(case)
    if extents_of(hits_of(damages)) == {"one"}:
        return _match_elements(case, damages)
    if case.group.is_pair:
        return _match_two_models(case)
    return None


def _match_elements(case: Case, damages: list[list[TensorDiff]]) -> Match:
    """Match single elements that differ alone."""
    facts: list[Message] = []
    for damage in damages:
        facts += _list_facts(damage, case)
    match = case.make_match(list(chain(*damages)), [*facts, *rest_facts(case)])

    if case.group.is_pair:
        # Replicas have one history, but somebody may have edited one of two models.
        is_flip = all(map(_is_clear_flip, damages))
        return match if is_flip else match.as_consistent("SYN399")
    is_likely = all(_is_likely(damage, case) for damage in damages)
    return match if is_likely else _doubt(match, case)


def _is_likely(damage: list[TensorDiff], case: Case) -> bool:
    """Whether a bit flip explains an element better than code that clips or edits it."""
    flipped = find_flipped(damage)
    if flipped is not None:
        return _is_conclusive(flipped, case.group)
    earlier = _find_earlier_flip(damage, case)
    return earlier is not None and _is_conclusive(earlier.diff, earlier.group)


def _is_conclusive(flipped: TensorDiff, group: Comparison) -> bool:
    """Whether a single differing bit shows a flip: no clipped gradient, and no small change of a few low bits."""
    kinds = group.evidence.names
    # Without step counters.
    states = [state for state in _states_of(flipped.name, group) if kinds[state] == "optimizer"]
    if select_names(out_of_sync(group), states):
        return False
    return bool(states) or not _is_low_bit(flipped)


def _states_of(name: str, group: Comparison) -> list[str]:
    """Return the names of the optimizer state of a parameter."""
    prefix = f"optimizer.{name}."
    return [state for state in group.evidence.names if state.startswith(prefix)]


def _is_low_bit(diff: TensorDiff) -> bool:
    """Whether the differing bit is among the lowest, or unknown."""
    return not is_at_least(evidence_of(diff).bit, _LOW)


def _doubt(match: Match, case: Case) -> Match:
    """Return the match of elements that code may have changed."""
    states_agree = case.compared("optimizer") > 0 and not has_kind(match.tensors, "optimizer")
    fits = {
        # Clipped gradients and gradients of zero change the optimizer state too.
        "SYN213": not states_agree,
        "SYN225": not states_agree,
        # A mask sets elements to zero.
        "SYN226": any(0 in evidence_of(diff).values.values() for diff in match.tensors),
        # Each tensor-parallel rank may have computed its own gradient of a replicated tensor.
        "SYN231": bool(agreeing_along_tensor_parallel(match.tensors, case)),
    }
    fix = choose_unsure_fix(Text, case)
    return match.with_cause(Text.CAUSE_UNSURE, fix).as_consistent(*select_codes(fits))


def _match_two_models(case: Case) -> Match | None:
    """Match single elements of two models, whatever else differs."""
    converted = case.related(RelationKind.LOCAL)
    flipped = tuple(filter(_is_large_flip, case.differing("parameter", "buffer")))
    damaged = (*converted, *flipped)
    if not 0 < len(damaged) <= MOST:
        return None
    facts: list[Message] = []
    for diff in converted:
        facts.append(_state_change(diff))
    for diff in flipped:
        facts += _list_facts([diff], case)
    return Match(damaged, case.group.ranks, facts)


def _is_clear_flip(damage: list[TensorDiff]) -> bool:
    """Whether a single bit of a single element differs, and its values are not both integers, which people write."""
    flipped = find_flipped(damage)
    if flipped is None:
        return False
    return not all(map(_is_whole_number, evidence_of(flipped).values.values()))


def _is_whole_number(value: float | str) -> bool:
    """Whether a value of an element is an integer, in any dtype."""
    return isinstance(value, (int, float)) and value == round(value)


def _is_large_flip(diff: TensorDiff) -> bool:
    """Whether a single bit of a single element differs, in the sign or by a factor of at least 4."""
    number_format = _FORMATS.get(diff.dtype)
    if diff.numel < 2 or number_format is None:
        return False
    # Other code has other constants.
    if is_code_constant(diff.name) or not _is_clear_flip([diff]):
        return False
    return is_at_least(evidence_of(diff).bit, number_format.mantissa + 1)


def _state_change(diff: TensorDiff) -> Message:
    """State which element a conversion does not explain."""
    relation = parameters_of(diff)
    return Text.BESIDE_CAST(
        name=diff.name,
        element=index_text(relation["index"]),
        dtype=relation["dtype"],
        bits=relation["bits"],
        others=diff.numel - 1,
    )


def _list_facts(damage: list[TensorDiff], case: Case) -> list[Message]:
    """State which element differs, its values, and the proof of a flipped bit if there is one."""
    hit, *followers = damage
    flipped = find_flipped(damage)
    if flipped is not None:
        # Two models have a limit of their own for edited values.
        is_doubtful = not case.group.is_pair and not _is_conclusive(flipped, case.group)
        return [
            Text.FLIPPED(element=element_name(flipped), bit=_describe_bit(flipped)),
            *_element_facts(flipped),
            *follower_facts(followers),
            *state_if(is_doubtful, Text.DOUBTFUL()),
        ]

    bits = evidence_of(hit).flipped_bits
    return [
        Text.ONE_ELEMENT(element=element_name(hit)),
        *_element_facts(hit),
        *state_if(bits, Text.BITS(bits=bits)),
        *follower_facts(followers),
        _describe_earlier(_find_earlier_flip(damage, case)),
    ]


def _element_facts(diff: TensorDiff) -> tuple[Message, ...]:
    """State the values of the differing element, and that the remaining elements of its tensor agree."""
    values = dict(evidence_of(diff).values)
    return (
        *state_if(values, Text.VALUES(values=values)),
        Text.REST_OF_TENSOR(others=diff.numel - 1),
    )


def _describe_earlier(earlier: _EarlierFlip | None) -> Message:
    """State the bit that differed at an earlier step, if there was one."""
    if earlier is None:
        return Text.CONSISTENT()
    element = element_name(earlier.diff)
    return Text.FLIPPED_EARLIER(
        step=earlier.group.step,
        element=element,
        bit=_describe_bit(earlier.diff),
    )


class _EarlierFlip(NamedTuple):
    """A single bit that differed at an earlier step. group: of that step."""

    group: Comparison
    diff: TensorDiff


def _find_earlier_flip(damage: list[TensorDiff], case: Case) -> _EarlierFlip | None:
    """Return an earlier step at which a single bit of this element, or of its optimizer state, differed."""
    hit = damage[0]
    for group in case.series:
        names = {*_states_of(hit.name, group), *list_names(damage)}
        candidates = select_names(group.tensors, names)
        flipped = find_flipped(diff for diff in candidates if diff.index == hit.index)
        if flipped is not None:
            return _EarlierFlip(group, flipped)
    return None


def _describe_bit(diff: TensorDiff) -> Message:
    """State which bit differs, and its part of a floating-point number."""
    bit = evidence_of(diff).bit
    if bit is None:
        return Text.UNKNOWN_BIT()
    number_format = _FORMATS.get(diff.dtype)
    if number_format is None:
        return Text.INTEGER_BIT(bit=bit)
    return Text.BIT(bit=bit, part=number_format.part_of(bit))
