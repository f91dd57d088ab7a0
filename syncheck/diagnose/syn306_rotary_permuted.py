"""The rows of query or key follow the other convention for rotary embeddings.

Signature: the rows of each head of B are those of A in the other order of rotary position embeddings, bit by bit: the
two halves of a head one after the other (Hugging Face, Megatron-Core), or interleaved row by row (Meta's code,
torchtitan). Or they were permuted with heads of one size and back with heads of another size.

Cause: the conversion did not permute the rows of query and key, permuted them twice, or used another size of a head.
The model loads and generates text that is almost right at short distances.

Fix: permute the rows of query and key, and only these, when you convert between the two conventions. Biases of query
and key need the same permutation.

Incidents: none with a public thread that names it. Transformers' `convert_llama_weights_to_hf.py` and torchtitan's
`state_dict_adapter.py` have this permutation, and a conversion without it is the typical mistake.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN306"
SLUG = "rotary-permuted"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "Query or key rows follow the other convention for rotary embeddings than A, or were permuted with a wrong "
        "size of a head."
    )
    FIX = (
        "Permute the rows of query and key of each head in the conversion, with the number of heads of each of them, "
        "or remove a second permutation."
    )
    ROTARY = "{count:count tensor} of B {count:verb has|have} {order} for heads of {head_dim} rows: {names:names}"
    BACK = (
        "{count:count tensor} of B {count:verb was|were} permuted for heads of {head_dim} rows, and back for heads of "
        "{back} rows: {names:names}"
    )
    HALF = "the halves of each head one after the other"
    INTERLEAVED = "the halves of each head interleaved"


def apply(case: Case) -> Match | None:
    """Match the tensors with the other rotary order."""
    found = case.related(RelationKind.ROTARY)
    facts: list[Message] = []
    diffs_by_order: dict[tuple[str, int, int], list[TensorDiff]] = {}
    for diff in found:
        own = parameters_of(diff)
        diffs_by_order.setdefault((own["to"], own["head_dim"], own.get("back", 0)), []).append(diff)
    for (to, head, back), diffs in diffs_by_order.items():
        names = tuple(diff.name for diff in diffs)
        if back:
            facts.append(Text.BACK(count=len(diffs), head_dim=head, back=back, names=names))
            continue
        order = Text.HALF() if to == "half" else Text.INTERLEAVED()
        facts.append(Text.ROTARY(count=len(diffs), order=order, head_dim=head, names=names))
    return Match(found, case.group.ranks, facts) if found else None
