"""The difference is exactly one conversion to another dtype.

Signature: one model is the other one after a conversion of its dtype, bit by bit: B has another dtype, or it has the
dtype of A and was rounded to a smaller dtype in between, such as float32 to bfloat16 and back.

Cause: an export, a saved copy in low precision or an engine converted the weights. Weights that were rounded and stored
as float32 look exact, and training that continues from them loses the difference.

Fix: if the conversion is intended, pass `--cast DTYPE`. Otherwise save the float32 weights of the optimizer instead of
their low-precision copies.

Incidents: none with a public thread. DeepSpeed's model states are low-precision copies of the weights in its optimizer;
see docs/same-model.md.
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN307"
SLUG = "cast"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "These weights were converted to another dtype, and nothing else changed in them."
    FIX = "If the conversion is intended, pass {cast:option DTYPE}. Otherwise export the original weights."
    CAST = (
        "{count:count tensor} of {side} {count:verb equals|equal} {other} after a conversion to {dtype}: {names:names}"
    )


def apply(case: Case) -> Match | None:
    """Match the converted tensors."""
    found = case.related(RelationKind.CAST)
    facts = []
    for (side, dtype), diffs in case.related_by(("side", "dtype"), RelationKind.CAST).items():
        names = tuple(diff.name for diff in diffs)
        other = "A" if side == "B" else "B"
        facts.append(Text.CAST(count=len(diffs), side=side, other=other, dtype=dtype, names=names))
    return Match(found, case.group.ranks, facts) if found else None
