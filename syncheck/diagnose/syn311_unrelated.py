"""Tensors of B have nothing to do with those of A.

Signature: nearly all elements differ, and their correlation is zero within the noise of independent numbers, with and
without the largest elements. Or B is constant where A is not. No other relation was found. States of an optimizer are
not compared in this way: a few steps later, they have no correlation either. If only small tensors are unrelated, the
finding is consistent with a strong change too.

Cause: B was initialized and never loaded: a name was not found (`strict=False`), a module was created after loading, or
B is another model.

Fix: load with `strict=True` and list the names that the loader did not find. Check that modules exist before the
weights are loaded.

Incidents: vllm-project/speculators#1131 (random weights were saved), huggingface/transformers#46650 (names corrupted on
save, so that loading initializes the tensors).
"""

from __future__ import annotations

from dataclasses import replace

from syncheck.diagnose.case import Case, Match, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN311"
SLUG = "unrelated"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "These tensors of B were not loaded from A: they have fresh or foreign values."
    FIX = "Load with strict=True, and check the names that the loader did not find."
    UNRELATED = "{count:count tensor} of B {count:verb is|are} not correlated with A: {names:names}"
    CONSTANT = "{count:count tensor} of B {count:verb is|are} constant: {names:names}"


# A tensor of 64 elements is called uncorrelated below a correlation of 0.5, which strong changes of A reach too. In the
# trials of `syncheck diff`, all wrong statements were of smaller tensors alone.
ENOUGH_ELEMENTS = 256


def apply(case: Case) -> Match | None:
    """Match tensors without a relation to A."""
    found = case.related(RelationKind.UNRELATED)
    constant = tuple(diff.name for diff in found if "value" in parameters_of(diff))
    others = tuple(diff.name for diff in found if diff.name not in constant)
    facts = [Text.UNRELATED(count=len(others), names=others)] if others else []
    if constant:
        facts.append(Text.CONSTANT(count=len(constant), names=constant))
    if not found:
        return None
    match = Match(found, case.group.ranks, facts)
    if constant or any(diff.numel >= ENOUGH_ELEMENTS for diff in found):
        return match
    return replace(match, certainty="consistent", alternatives=("SYN399",))
