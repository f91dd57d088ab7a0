"""Scales were applied in one model only: of a quantized tensor, or of each row, column or block.

Signature: one model holds the stored numbers of a quantized tensor without their scales, bit by bit,
and the other model has the numbers and the scales. This case is proved. Or B equals A times a factor for
each row, column or block, within the rounding of the dtype.

Cause: a loader did not find the scales (another name, `weight_scale` instead of `weight_scale_inv`), read the numbers
as if they were weights, or applied the scales twice. The scales of a weight normalization, of SmoothQuant or AWQ, or of
a norm may have been folded into one of the models only.

Fix: multiply the numbers by their scales when you convert or load them, and make the loader fail for unused
scales (`strict=True`). The evidence states the blocks and the range of the factors.

Incidents: unslothai/unsloth#6978 (block scales ignored), Lightricks/LTX-2#172 (scales of tensors ignored).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.findings import Certainty
    from syncheck.records import TensorDiff

CODE = "SYN316"
SLUG = "scales-missing"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "Scales were applied in one of the models only, for each tensor, row, column or block."
    FIX = (
        "Apply the scales once in the conversion: of a quantized tensor, a weight normalization or a folded norm. Let "
        "the loader fail for unused scales."
    )
    STORED = (
        "{count:count tensor} of {side} {count:verb is|are} the stored numbers of quantized weights of {other}, "
        "without the scales for each {unit} (from {least:number 3} to {most:number 3}): {names:names}"
    )
    FITTED = (
        "{count:count tensor} of {side} {count:verb has|have} integers, within half a step of {other} with a scale for "
        "each {unit} (from {least:number 3} to {most:number 3}): {names:names}"
    )
    FACTORS = (
        "{count:count tensor} of B {count:verb is|are} A with a factor for each {unit} (from {least:number 3} to "
        "{most:number 3}): {names:names}"
    )
    TENSOR = "tensor"
    ROW = "row"
    COLUMN = "column"
    BLOCK = "block of {rows} x {columns}"
    MORE = "{count:count more kind} of scales"


def apply(case: Case) -> Match | None:
    """Match tensors without their scales, and tensors with a factor for each block."""
    unscaled = case.related(RelationKind.UNSCALED)
    found = (*unscaled, *case.related(RelationKind.FACTORS))
    if not found:
        return None
    diffs_by_kind: dict[tuple[Text, str, Message], list[TensorDiff]] = {}
    for diff in found:
        own = parameters_of(diff)
        sentence = Text.FACTORS
        if diff in unscaled:
            sentence = Text.FITTED if "fitted" in own else Text.STORED
        key = (sentence, own.get("side", ""), _name_unit(own["block"], own["of"]))
        diffs_by_kind.setdefault(key, []).append(diff)
    facts = []
    for (sentence, side, unit), diffs in diffs_by_kind.items():
        facts.append(_state_scales(sentence, side, unit, diffs))
    is_proved = all(sentence is Text.STORED for sentence, _, _ in diffs_by_kind)
    certainty: Certainty = "proved" if is_proved else "likely"
    return Match(found, case.group.ranks, limit_facts(facts, 4, Text.MORE), certainty=certainty)


def _state_scales(sentence: Text, side: str, unit: Message, diffs: list[TensorDiff]) -> Message:
    """State which tensors have scales of one kind, and the range of the scales."""
    parameters = [parameters_of(diff) for diff in diffs]
    return sentence(
        count=len(diffs),
        side=side,
        other="A" if side == "B" else "B",
        unit=unit,
        least=min(own["least"] for own in parameters),
        most=max(own["most"] for own in parameters),
        names=tuple(diff.name for diff in diffs),
    )


def _name_unit(block: tuple[int, int], shape: tuple[int, int]) -> Message:
    """Name the part of a matrix that has one scale."""
    if block == shape:
        return Text.TENSOR()
    if block == (1, shape[1]):
        return Text.ROW()
    if block == (shape[0], 1):
        return Text.COLUMN()
    return Text.BLOCK(rows=block[0], columns=block[1])
