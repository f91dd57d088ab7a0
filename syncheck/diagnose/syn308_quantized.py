"""One model is the other one, quantized: each value is within half a step of its scheme.

Signature: B stores integers or 8-bit floats with scales, and each value of B times its scale is within half a
quantization step of A. Or B stores floats that are multiples of one step for each tensor, row or block, with at most
255 steps: weights that were quantized and stored as floats again. Or the reverse, with A quantized. The scales are
plausible: the largest value in the block of a scale uses a part of the range of the stored numbers, so that the values
are not just rounded to zero. Without scales in the file, the evidence states bounds only.

Cause: the copy was exported in a quantized format. Quantization is intended in most cases, but an uninitialized or
exchanged scale is not.

Fix: if quantization is intended, accept this finding with `--allow SYN308`: values beyond half a step, and values with
scales that are NaN, infinite, negative or too large, are still reported as SYN399.

Incidents: sgl-project/sglang#28546 (uninitialized scales).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN308"
SLUG = "quantized"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "One model is a quantized copy of the other: each value is within half a step of its quantization scheme."
    FIX = "If quantization is intended, pass {allow:option=SYN308}."
    QUANTIZED = (
        "{count:count tensor} {count:verb is|are} within half a step of {scheme}, at most {steps:number 3} steps: "
        "{names:names}"
    )


def apply(case: Case) -> Match | None:
    """Match the quantized tensors."""
    found = case.related(RelationKind.QUANTIZED)
    facts = []
    for scheme, diffs in case.related_by("scheme", RelationKind.QUANTIZED).items():
        names = tuple(diff.name for diff in diffs)
        steps = max(float(parameters_of(diff)["steps"]) for diff in diffs)
        facts.append(Text.QUANTIZED(count=len(diffs), scheme=scheme, steps=steps, names=names))
    return Match(found, case.group.ranks, facts) if found else None
