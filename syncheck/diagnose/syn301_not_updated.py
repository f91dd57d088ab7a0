"""B is the model before the update: it received none of the new weights.

Signature: all tensors of B that differ from A equal those of the model before the update, bit by bit, and no tensor of
B has a value that only the updated A has. The earlier model is the one given with `--base`, or an earlier step of A in
its folder.

Cause: the update never reached B. A merge wrote the base model again, an export read an old step, or an engine kept the
weights with which it started.

Fix: check that the code that merges, exports or sends the weights reads the new model, and that it stops if it does
not. Compare again with the same `--base`.

Incidents: verl-project/verl#7285 and verl-project/verl#4553 (the merged folder is byte-identical to the base model),
verl-project/verl#7495 (an adapter was never delivered), huggingface/trl#5312 (sleep mode lost the synchronization).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match, relation_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN301"
SLUG = "not-updated"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "B is the model before the update: none of the new weights were delivered."
    FIX = "Check which model the merge, export or weight transfer reads, and run it again on the updated model."
    EQUAL = "{count:count tensor} of B {count:verb equals|equal} the earlier model {base}, and not A: {names:names}"
    NONE = "no tensor of B has an updated value"


def apply(case: Case) -> Match | None:
    """Match the tensors of the earlier model, if B has no updated tensor."""
    stale = case.related(RelationKind.BASE)
    others = any(relation_of(diff) is not RelationKind.BASE for diff in case.tensors)
    if not stale or others or case.group.evidence.updated:
        return None
    names = tuple(diff.name for diff in stale)
    equal = Text.EQUAL(count=len(stale), base=case.group.evidence.base, names=names)
    return Match(stale, case.group.ranks, [equal, Text.NONE()])
