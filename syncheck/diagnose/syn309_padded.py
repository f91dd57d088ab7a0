"""Rows or columns were added or removed; all others are equal.

Signature: the shapes differ in one dimension, and the common part is equal, bit by bit.

Cause: one library pads the vocabulary to a multiple of 64 or 128 times the tensor-parallel size, a tokenizer got new
tokens, or a conversion cut the padding off.

Fix: if the padding is intended, compare with a map that states its multiple (the built-in maps do for vocabularies), or
pass `--allow SYN309`. Otherwise resize the embedding and the output layer together.

Incidents: none with a public thread. Megatron-LM pads vocabularies by `--make-vocab-size-divisible-by` times the
tensor-parallel size, so checkpoints of other sizes have other paddings.
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN309"
SLUG = "padded"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "One model has additional rows or columns, such as the padding of a vocabulary; the common part is equal."
    CAUSE_OTHER = "One model has additional elements in these tensors; the common part is equal."
    FIX = (
        "If the padding is intended, pass {allow:option=SYN309} or a map that allows it. Otherwise resize the "
        "embedding and output layers together."
    )
    FIX_OTHER = (
        "If the additional elements are intended, pass {allow:option=SYN309}. Otherwise build both models from one "
        "configuration, and save the whole tensors."
    )
    LONGER = "B has {count:count more index|more indices} of dimension {dim} in {names:names}"
    SHORTER = "B lacks the last {count:count index|indices} of dimension {dim} in {names:names}"


def apply(case: Case) -> Match | None:
    """Match the padded tensors."""
    found = case.related(RelationKind.PADDED)
    facts = []
    for (dim, added), diffs in case.related_by(("dim", "added"), RelationKind.PADDED).items():
        sentence = Text.LONGER if added > 0 else Text.SHORTER
        facts.append(sentence(count=abs(added), dim=dim, names=tuple(diff.name for diff in diffs)))
    if not found:
        return None
    # Only matrices have a row for each token of a vocabulary.
    is_matrix = any(len(diff.shape) > 1 for diff in found)
    cause, fix = (None, None) if is_matrix else (Text.CAUSE_OTHER, Text.FIX_OTHER)
    return Match(found, case.group.ranks, facts, cause=cause, fix=fix)
