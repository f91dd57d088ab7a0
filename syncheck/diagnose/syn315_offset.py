"""Tensors of B are tensors of A plus a constant.

Signature: B equals A plus one number, within the rounding of the dtype, in all elements of a tensor. The elements are
so many and so different that the number does not fit by chance.

Cause: the libraries store the tensor around another center. The norms of Gemma multiply by `1 + weight`, so that a
conversion adds 1, or forgets this step. Zero-centered norms of Megatron-Core
(`--apply-layernorm-1p`) have the same offset. A bias or the mean of an image may have been folded into a tensor.

Fix: add or subtract the constant of the evidence in the conversion, once, for the tensors that the evidence lists.

Incidents: ggml-org/llama.cpp#5631 (the norms of Gemma need an offset of 1).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN315"
SLUG = "offset"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "A constant was added to these tensors of B, as between norms that multiply by weight and by 1 + weight."
    FIX = "Add or subtract the constant in the conversion, once, where the library of B expects another center."
    MORE = "{count:count more constant}"
    OFFSET = "{count:count tensor} of B {count:verb is|are} A plus {offset:number}: {names:names}"


def apply(case: Case) -> Match | None:
    """Match the tensors with an offset."""
    found = case.related(RelationKind.OFFSET)
    if not found:
        return None
    diffs_by_offset: dict[str, list[TensorDiff]] = defaultdict(list)
    for diff in found:
        diffs_by_offset[f"{parameters_of(diff)['offset']:.3g}"].append(diff)
    facts = []
    for diffs in diffs_by_offset.values():
        names = tuple(diff.name for diff in diffs)
        facts.append(Text.OFFSET(count=len(diffs), offset=parameters_of(diffs[0])["offset"], names=names))
    return Match(found, case.group.ranks, limit_facts(facts, 4, Text.MORE))
