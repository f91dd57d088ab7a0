"""Two names are one weight in one model, and two different weights in the other model.

Signature: in one model, two tensors with the names of an embedding and its output layer, or with shared memory, hold
equal values. In the other model they differ, and one of the two tensors agrees between A and B.

Cause: the loader or the conversion of one model did not tie its weights, so that the output layer kept its initial
values or was trained alone. Or the loader tied separate weights and lost the output layer: the configuration states
`tie_word_embeddings`, or the file has no output layer.

Fix: compare `tie_word_embeddings` of both configurations. Tie the weights after building and loading the model
(`model.tie_weights()` in transformers), or save both tensors and load them untied.

Incidents: huggingface/transformers#46650 (names corrupted on save, so that loading initializes the tensors).
NVIDIA/Megatron-LM#4641, NVIDIA/Megatron-LM#844 and NVIDIA/Megatron-LM#656 (embedding and output layer drifted apart).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN314"
SLUG = "tie-changed"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "One model has one weight under two names, and the other model has two different weights there."
    FIX = (
        "Compare tie_word_embeddings of both models. Tie the weights after loading (model.tie_weights() in "
        "transformers), or save and load both tensors."
    )
    TIED = "{name} equals {other} in {tied}, and they differ in {separate}"
    MORE = "{count:count more tensor}"


def apply(case: Case) -> Match | None:
    """Match tensors that are tied in one of the models only."""
    found = case.related(RelationKind.TIE)
    if not found:
        return None
    facts = []
    for diff in found:
        own = parameters_of(diff)
        separate = "A" if own["tied"] == "B" else "B"
        facts.append(Text.TIED(name=diff.name, other=own["other"], tied=own["tied"], separate=separate))
    return Match(found, case.group.ranks, limit_facts(facts, 4, Text.MORE))
