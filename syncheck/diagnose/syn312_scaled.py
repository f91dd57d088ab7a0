"""Tensors of B are those of A times a constant factor.

Signature: B equals A times one factor, within the rounding of the dtype, in all elements of a tensor. The elements are
so many and so different that the factor does not fit by chance.

Cause: a scale was applied twice or not at all: the scale of an adapter or a quantized tensor, a normalization folded
into a weight, an average over ranks, or the scale of an embedding.

Fix: compare the factor in the evidence with the scales of the conversion: alpha / r, the number of ranks, the square
root of the width.

Incidents: pytorch/torchtitan#2318 (a gradient norm too large by a factor of 8) shows the same mistake in gradients.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN312"
SLUG = "scaled"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "These tensors of B were multiplied by a constant."
    FIX = (
        "Look for a scale of this size in the conversion: alpha / r, the scale of a quantized tensor, a number of "
        "ranks, or the square root of a width."
    )
    MORE = "{count:count more factor}"
    SCALED = "{count:count tensor} of B {count:verb is|are} {factor:number} times A: {names:names}"


def apply(case: Case) -> Match | None:
    """Match the scaled tensors."""
    found = case.related(RelationKind.SCALED)
    by_factor: dict[str, list[TensorDiff]] = defaultdict(list)
    for diff in found:
        by_factor[f"{parameters_of(diff)['factor']:.3g}"].append(diff)
    facts = [
        Text.SCALED(
            count=len(diffs), factor=parameters_of(diffs[0])["factor"], names=tuple(diff.name for diff in diffs)
        )
        for diffs in by_factor.values()
    ]
    return Match(found, case.group.ranks, limit_facts(facts, 4, Text.MORE)) if found else None
