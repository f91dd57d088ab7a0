"""SYN307, SYN308, SYN311, SYN312, SYN315 and SYN316: the values of B were computed from A, or are unrelated."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.measures import list_parameter, parameters_of, relation_of
from syncheck.diagnose.rule import MOST_FACTS, other_model, state_tensors
from syncheck.diagnose.statements import limit_facts
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

# A tensor of 64 elements is called uncorrelated below a correlation of 0.5, which strong changes of A reach too. In the
# trials of `syncheck diff`, all wrong statements were of smaller tensors alone.
_ENOUGH_ELEMENTS = 256


class Cast(Sentence, topic="SYN307"):
    """The difference is exactly one conversion to another dtype.

    Signature: one model is the other one after a conversion of its dtype, bit by bit: B has another dtype, or it has
    the dtype of A and was rounded to a smaller dtype in between, such as float32 to bfloat16 and back. The evidence
    states whether the conversion truncated: it cut off the last bits, where torch rounds to the nearest number.
    Weights with a merged adapter are the exception: their sums may fall on the neighbouring number, within the rounding
    of the merge.

    Cause: an export, a saved copy in low precision or an engine converted the weights. Weights that were rounded and
    stored as float32 look exact, and training that continues from them loses the difference.

    Fix: if the conversion is intended, pass `--cast DTYPE`. Two conversions in turn, like float32 to float16 to
    bfloat16, are more than `--cast` accepts: convert the original weights once, or compare the copy in between with B.
    Truncation is more than it accepts too, because the error is twice as large and has one direction: convert with
    `tensor.to(dtype)`.
    The option does not accept elements beyond the range of the dtype, and tensors of zeros after the conversion: use a
    dtype with a larger range. The option accepts single elements that become zero, and a note counts the elements.
    Otherwise save the float32 weights of the optimizer instead of their low-precision copies.

    Incidents: none with a public thread. DeepSpeed's model states are low-precision copies of the weights in its
    optimizer; see docs/same-model.md.
    """

    CAUSE = "These weights were converted to another dtype, and nothing else changed in them."
    FIX = "If the conversion is intended, pass {cast:option DTYPE}. Otherwise export the original weights."
    FIX_TWICE = (
        "Convert the original weights once, to the dtype that you need. {cast:option DTYPE} accepts a single "
        "conversion: if two are intended, compare the copy between them with the last one."
    )
    CAUSE_TRUNCATED = (
        "These weights were converted to another dtype by truncation: the last bits were cut off instead of rounded to "
        "the nearest number. Nothing else changed in them."
    )
    FIX_TRUNCATED = (
        "Convert with `tensor.to(dtype)`, which rounds to the nearest number. {cast:option DTYPE} accepts rounding "
        "only: if truncation is intended, pass {allow:option=SYN307}."
    )
    CAST = (
        "{count:count tensor} of {side} {count:verb equals|equal} {other} after a conversion to {dtype}: {names:names}"
    )
    TWICE = (
        "{count:count tensor} of {side} {count:verb equals|equal} {other} after a conversion to {dtype} and then to "
        "{then}: {names:names}"
    )
    TRUNCATED = (
        "{count:count tensor} of {side} {count:verb equals|equal} {other} truncated to {dtype}, not rounded: "
        "{names:names}"
    )
    CAUSE_BEYOND_RANGE = (
        "A conversion to another dtype lost elements beyond the range of the dtype. Nothing else changed."
    )
    FIX_BEYOND_RANGE = (
        "Convert the tensors to a dtype with a larger range, like bfloat16, or keep the dtype. {cast:option DTYPE} "
        "accepts no lost elements: if the loss is intended, pass {allow:option=SYN307}."
    )
    OVERFLOWED = (
        "{lost:count element} of {names:names} in {other} {lost:verb is|are} beyond the range of {dtype}, the first at "
        "{index}; the rest is equal in {side} after the conversion"
    )
    FLUSHED = (
        "{names:names} of {side} is zero after a conversion to {dtype}: all {lost:count element} other than zero in "
        "{other} {lost:verb is|are} below its smallest number, the first at {index}"
    )
    MERGED = (
        "{count:count tensor} of {side} {count:verb equals|equal} {other} after a conversion to {dtype}, within the "
        "rounding of a merge: {names:names}"
    )


# The statement about a conversion, by its pattern.
_CONVERSIONS = {
    "": Cast.CAST,
    "twice": Cast.TWICE,
    "merged": Cast.MERGED,
    "truncated": Cast.TRUNCATED,
    "overflowed": Cast.OVERFLOWED,
    "flushed": Cast.FLUSHED,
}


def state_cast(tensors: Sequence[TensorDiff]) -> Message:
    """State which model was converted, how, and to which dtypes."""
    parameters = dict(parameters_of(tensors[0]))
    pattern = parameters.pop("pattern", "twice" if "then" in parameters else "")
    sentence = _CONVERSIONS[pattern]
    if "index" in parameters:
        parameters["lost"] = parameters.pop("count")
        parameters["index"] = str(list(parameters["index"]))
    return state_tensors(
        sentence,
        tensors,
        other=other_model(parameters["side"]),
        **parameters,
    )


def advise_one_conversion(match: Match) -> Match:
    """Replace the fix if no value of the option accepts the conversion: two in turn, truncated, or beyond the range."""
    patterns = set(list_parameter(match.tensors, "pattern"))
    if not patterns.isdisjoint(("overflowed", "flushed")):
        return match.with_cause(Cast.CAUSE_BEYOND_RANGE, Cast.FIX_BEYOND_RANGE)
    if "truncated" in patterns:
        # Some tensors may be rounded.
        cause = Cast.CAUSE_TRUNCATED if len(patterns) == 1 else match.cause
        return match.with_cause(cause, Cast.FIX_TRUNCATED)
    is_single = {None} == {parameters_of(diff).get("then") for diff in match.tensors}
    return match if is_single else replace(match, fix=Cast.FIX_TWICE)


class Quantized(Sentence, topic="SYN308"):
    """One model is the other one, quantized: each value is within half a step of its scheme.

    Signature: B stores integers or 8-bit floats with scales, and each value of B times its scale is within half a
    quantization step of A. Or B stores floats that are multiples of one step for each tensor, row or block, with at
    most 255 steps: weights that were quantized and stored as floats again. Or the reverse, with A quantized. The scales
    are plausible: the largest value in the block of a scale uses a part of the range of the stored numbers, so that the
    values are not just rounded to zero. Without scales in the file, the evidence states bounds only.

    Cause: the copy was exported in a quantized format. Quantization is intended in most cases, but an uninitialized or
    exchanged scale is not.

    Fix: if quantization is intended, accept this finding with `--allow SYN308`: values beyond half a step, and values
    with scales that are NaN, infinite, negative or too large, are still reported as SYN399.

    Incidents: sgl-project/sglang#28546 (uninitialized scales).
    """

    CAUSE = "One model is a quantized copy of the other: each value is within half a step of its quantization scheme."
    FIX = "If quantization is intended, pass {allow:option=SYN308}."
    QUANTIZED = (
        "{count:count tensor} {count:verb is|are} within half a step of {scheme}, at most {steps:number 3} steps: "
        "{names:names}"
    )


def state_quantized(tensors: Sequence[TensorDiff]) -> Message:
    """State the scheme of the quantization, and the largest difference in its steps."""
    return state_tensors(
        Quantized.QUANTIZED,
        tensors,
        scheme=parameters_of(tensors[0])["scheme"],
        steps=float(max(list_parameter(tensors, "steps"))),
    )


class Unrelated(Sentence, topic="SYN311"):
    """Tensors of B have nothing to do with those of A.

    Signature: nearly all elements differ, and their correlation is zero within the noise of independent numbers, with
    and without the largest elements. Or B is constant where A is not. No other relation was found. States of an
    optimizer are not compared in this way: a few steps later, they have no correlation either. If only small tensors
    are unrelated, the finding is consistent with a strong change too.

    Cause: B was initialized and never loaded: a name was not found (`strict=False`), a module was created after
    loading, or B is another model.

    Fix: load with `strict=True` and list the names that the loader did not find. Check that modules exist before the
    weights are loaded.

    Incidents: vllm-project/speculators#1131 (random weights were saved), huggingface/transformers#46650 (names
    corrupted on save, so that loading initializes the tensors).
    """

    CAUSE = "These tensors of B were not loaded from A: they have fresh or foreign values."
    FIX = "Load with `strict=True`, and check the names that the loader did not find."
    UNRELATED = "{count:count tensor} of B {count:verb is|are} not correlated with A: {names:names}"
    CONSTANT = "{count:count tensor} of B {count:verb is|are} constant: {names:names}"


def match_unrelated(case: Case) -> Match | None:
    """Match tensors without a relation to A."""
    unrelated = case.related(RelationKind.UNRELATED)
    if not unrelated:
        return None
    tensors_by_sentence: dict[Sentence, list[TensorDiff]] = {
        Unrelated.UNRELATED: [],
        Unrelated.CONSTANT: [],
    }
    for diff in unrelated:
        # A constant has no correlation, and its value as parameter.
        is_constant = "value" in parameters_of(diff)
        sentence = Unrelated.CONSTANT if is_constant else Unrelated.UNRELATED
        tensors_by_sentence[sentence].append(diff)
    facts = []
    for relation_sentence, tensors in tensors_by_sentence.items():
        if tensors:
            facts.append(state_tensors(relation_sentence, tensors))

    match = Match(unrelated, case.group.ranks, facts)
    largest = max(diff.numel for diff in unrelated)
    if largest >= _ENOUGH_ELEMENTS or tensors_by_sentence[Unrelated.CONSTANT]:
        return match
    return match.as_consistent("SYN399")


class _Scales(NamedTuple):
    """What the scales of several tensors have in common."""

    sentence: Sentence
    side: str
    """The model without scales; empty if neither model has scales of its own."""
    unit: Message
    """The part of a matrix that has one scale."""


class Scaled(Sentence, topic="SYN312"):
    """Tensors of B are those of A times a constant factor.

    Signature: B equals A times one factor, within the rounding of the dtype, in all elements of a tensor. The elements
    are so many and so different that the factor does not fit by chance.

    Cause: a scale was applied twice or not at all: the scale of an adapter or a quantized tensor, a normalization
    folded into a weight, an average over ranks, or the scale of an embedding.

    Fix: compare the factor in the evidence with the scales of the conversion: alpha / r, the number of ranks, the
    square root of the width.

    Incidents: pytorch/torchtitan#2318 (a gradient norm too large by a factor of 8) shows the same mistake in gradients.
    """

    CAUSE = "These tensors of B were multiplied by a constant."
    FIX = (
        "Look for a scale of this size in the conversion: alpha / r, the scale of a quantized tensor, a number of "
        "ranks, or the square root of a width."
    )
    MORE = "{count:count more factor}"
    SCALED = "{count:count tensor} of B {count:verb is|are} {factor:number} times A: {names:names}"


def state_factor(tensors: Sequence[TensorDiff]) -> Message:
    """State the factor between A and B."""
    return state_tensors(Scaled.SCALED, tensors, factor=parameters_of(tensors[0])["factor"])


class Offset(Sentence, topic="SYN315"):
    """Tensors of B are tensors of A plus a constant.

    Signature: B equals A plus one number, within the rounding of the dtype, in all elements of a tensor. The elements
    are so many and so different that the number does not fit by chance.

    Cause: the libraries store the tensor around another center. The norms of Gemma multiply by `1 + weight`, so that a
    conversion adds 1, or forgets this step. Zero-centered norms of Megatron-Core (`--apply-layernorm-1p`) have the same
    offset. A bias or the mean of an image may have been folded into a tensor.

    Fix: add or subtract the constant of the evidence in the conversion, once, for the tensors that the evidence lists.

    Incidents: ggml-org/llama.cpp#5631 (the norms of Gemma need an offset of 1).
    """

    CAUSE = "A constant was added to these tensors of B, as between norms that multiply by weight and by 1 + weight."
    FIX = "Add or subtract the constant in the conversion, once, where the library of B expects another center."
    MORE = "{count:count more constant}"
    OFFSET = "{count:count tensor} of B {count:verb is|are} A plus {offset:number}: {names:names}"


def state_offset(tensors: Sequence[TensorDiff]) -> Message:
    """State the constant that was added."""
    return state_tensors(Offset.OFFSET, tensors, offset=parameters_of(tensors[0])["offset"])


class ScalesMissing(Sentence, topic="SYN316"):
    """Scales were applied in one model only: of a quantized tensor, or of each row, column or block.

    Signature: one model holds the stored numbers of a quantized tensor without their scales, bit by bit, and the other
    model has the numbers and the scales. This case is proved. Or B equals A times a factor for each row, column or
    block, within the rounding of the dtype. Or some scales of a quantized tensor are wrong: with other scales, all
    values are within half a step.

    Cause: a loader did not find the scales (another name, `weight_scale` instead of `weight_scale_inv`), read the
    numbers as if they were weights, or applied the scales twice. The scales of a weight normalization, of SmoothQuant
    or AWQ, or of a norm may have been folded into one of the models only.

    Fix: multiply the numbers by their scales when you convert or load them, and make the loader fail for unused scales
    (`strict=True`). The evidence states the blocks and the range of the factors.

    Incidents: unslothai/unsloth#6978 (block scales ignored), Lightricks/LTX-2#172 (scales of tensors ignored).
    """

    CAUSE = "Scales were applied in one of the models only, for each tensor, row, column or block."
    FIX = (
        "Apply the scales once in the conversion: of a quantized tensor, a weight normalization or a folded norm. Let "
        "the loader fail for unused scales."
    )
    CAUSE_WRONG = (
        "Some scales of a quantized tensor do not fit its numbers: they were computed for other weights, overwritten, "
        "or converted twice."
    )
    FIX_WRONG = (
        "Quantize the listed tensors again, numbers and scales together, or copy the scales from the file that was "
        "quantized."
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
    WRONG = (
        "{wrong:count scale} of {total} of {name} in {side} {wrong:verb is|are} wrong: the first for the {unit} at "
        "{first}; values are about {factors} times those of {other}, and within half a step of them otherwise"
    )
    FACTOR = "{least:number 3}"
    RANGE = "{least:number 3} to {most:number 3}"
    TENSOR = "tensor"
    ROW = "row"
    COLUMN = "column"
    BLOCK = "block of {rows} x {columns}"
    MORE = "{count:count more kind} of scales"


def match_missing_scales(case: Case) -> Match | None:
    """Match tensors without their scales, and tensors with a factor for each block."""
    tensors = (*case.related(RelationKind.UNSCALED), *case.related(RelationKind.FACTORS))
    if not tensors:
        return None
    wrong_tensors = [diff for diff in tensors if "wrong" in parameters_of(diff)]
    tensors_by_scales: dict[_Scales, list[TensorDiff]] = defaultdict(list)
    for diff in tensors:
        if diff not in wrong_tensors:
            tensors_by_scales[_describe_scales(diff)].append(diff)
    facts = list(map(_state_wrong_scales, wrong_tensors))
    sentences = set()
    for scales, similar in tensors_by_scales.items():
        sentences.add(scales.sentence)
        facts.append(_state_scales(scales, similar))
    is_proof = not wrong_tensors and sentences == {ScalesMissing.STORED}
    match = Match(
        tensors=tensors,
        ranks=case.group.ranks,
        facts=limit_facts(facts, MOST_FACTS, ScalesMissing.MORE),
        # Only stored numbers are equal, bit by bit. All other scales are fitted.
        certainty="proved" if is_proof else None,
    )
    return match if sentences else match.with_cause(ScalesMissing.CAUSE_WRONG, ScalesMissing.FIX_WRONG)


def _state_wrong_scales(diff: TensorDiff) -> Message:
    """State how many scales of a quantized tensor are wrong, the first of them, and by which factors."""
    parameters = parameters_of(diff)
    least, most = parameters["least"], parameters["most"]
    factors = ScalesMissing.FACTOR if least == most else ScalesMissing.RANGE
    return ScalesMissing.WRONG(
        wrong=parameters["wrong"],
        total=parameters["count"],
        name=diff.name,
        side=parameters["side"],
        other=other_model(parameters["side"]),
        unit=_name_unit(parameters["block"], parameters["of"]),
        first=str(list(parameters["first"])),
        factors=factors(least=least, most=most),
    )


def _describe_scales(diff: TensorDiff) -> _Scales:
    """Return which sentence states the scales of a tensor, and its parameters."""
    parameters = parameters_of(diff)
    sentence = ScalesMissing.STORED
    if relation_of(diff) is RelationKind.FACTORS:
        sentence = ScalesMissing.FACTORS
    elif "fitted" in parameters:
        sentence = ScalesMissing.FITTED
    unit = _name_unit(parameters["block"], parameters["of"])
    return _Scales(sentence, parameters.get("side", ""), unit)


def _state_scales(scales: _Scales, tensors: Sequence[TensorDiff]) -> Message:
    """State which tensors have scales of one kind, and the range of the scales."""
    return state_tensors(
        scales.sentence,
        tensors,
        side=scales.side,
        other=other_model(scales.side),
        unit=scales.unit,
        least=min(list_parameter(tensors, "least")),
        most=max(list_parameter(tensors, "most")),
    )


def _name_unit(block: tuple[int, int], shape: tuple[int, int]) -> Message:
    """Name the part of a matrix that has one scale."""
    rows, columns = shape
    units = {
        (rows, 1): ScalesMissing.COLUMN(),
        (1, columns): ScalesMissing.ROW(),
        # A matrix of one row or column is named as a whole.
        (rows, columns): ScalesMissing.TENSOR(),
    }
    if block in units:
        return units[block]
    return ScalesMissing.BLOCK(rows=block[0], columns=block[1])
