"""Tensors of B are tensors of A with two dimensions exchanged.

Signature: B equals A after two dimensions are exchanged, bit by bit (after a conversion to the dtype of B, if the
dtypes differ).

Cause: the libraries store linear layers in different orientations: GPT-2's Conv1D stores (inputs, outputs),
torch.nn.Linear (outputs, inputs), and stacked experts exist in both. The conversion forgot to transpose, or transposed
twice.

Fix: transpose the tensors in the conversion. Square matrices load without an error, so test the conversion with data.
If B is meant for a library that stores them this way, pass a map with `--map`.

Incidents: huggingface/transformers#47031 (experts silently transposed).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

CODE = "SYN304"
SLUG = "transposed"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "The conversion exchanged two dimensions of these tensors, or did not exchange them where the layout requires"
        " it."
    )
    FIX = (
        "Transpose these tensors in the conversion. If the layout of B requires this orientation, pass a map with "
        "{map:option NAME|FILE}."
    )
    TRANSPOSED = (
        "{count:count tensor} of B {count:verb is|are} transposed: dimensions {first} and {second} of {names:names}"
    )
    SQUARE = "{count:count tensor} {count:verb has|have} equal dimensions, so loading reports no error"


def apply(case: Case) -> Match | None:
    """Match the transposed tensors."""
    facts: list[Message] = []
    for dims, diffs in case.related_by("dims", RelationKind.TRANSPOSED).items():
        names = tuple(diff.name for diff in diffs)
        facts.append(Text.TRANSPOSED(count=len(diffs), first=dims[0], second=dims[1], names=names))
    found = case.related(RelationKind.TRANSPOSED)
    if square := sum(diff.reason is None for diff in found):
        facts.append(Text.SQUARE(count=square))
    return Match(found, case.group.ranks, facts) if found else None
