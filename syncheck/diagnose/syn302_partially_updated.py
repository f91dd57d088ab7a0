"""Some tensors of B were updated, and some still have the values of the model before the update.

Signature: some tensors of B equal the model before the update, bit by bit, while A has other values, and other tensors
of B differ from that model. The earlier model is the one given with `--base`, or an earlier step of A in its folder.

Cause: the update skipped tensors: names that a loader does not know, fused tensors that it never writes, parameters
that were added or unfrozen later, or a transfer that stopped halfway.

Fix: the finding lists all stale tensors. Add their names to the code that converts or sends the weights, and make it
fail for names that it does not know (`strict=True`).

Incidents: pytorch/torchtitan#3867 (a fused weight was never updated), vllm-project/vllm#42821 (a second load_weights
corrupts experts), hao-ai-lab/FastVideo#1440 (averaged weights were dropped).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN302"
SLUG = "partially-updated"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "The update reached only a part of B: the other tensors are those of the model before the update."
    FIX = (
        "Add the listed tensors to the code that converts or sends the weights, and let it fail for unknown names "
        "(strict=True)."
    )
    STALE = "{count:count tensor} of B {count:verb equals|equal} the earlier model {base}, and not A: {names:names 10}"
    UPDATED = "{count:count tensor} {count:verb was|were} updated"


def apply(case: Case) -> Match | None:
    """Match the tensors of the earlier model, if other tensors of B were updated."""
    stale = case.related(RelationKind.BASE)
    if not stale:
        return None
    names = tuple(diff.name for diff in stale)
    facts = [Text.STALE(count=len(stale), base=case.group.evidence.base, names=names)]
    if updated := case.group.evidence.updated:
        facts.append(Text.UPDATED(count=updated))
    return Match(stale, case.group.ranks, facts)
