"""Weights are tied on some ranks and separate tensors on other ranks.

Signature: in some files two names share memory (the same storage, offset, shape and strides), in other files they do
not. Only torch.save stores this. This is information and never fails a run.

Cause: weights that should be tied, for example the input embedding and the output layer of a language model, were not
tied on every rank. One rank built, cast or loaded the model differently, replaced the embedding without tying it again,
or a library saved a copy of a weight. While the copies hold equal values, nothing differs. From the next step on, each
copy gets its own gradient, and the copies drift apart.

Fix: tie the weights on every rank after building, loading and resizing (`model.tie_weights()` in transformers), and
before wrapping the model.

Incidents: NVIDIA/Megatron-LM#4641, NVIDIA/Megatron-LM#844 and NVIDIA/Megatron-LM#656 (embedding and output layer, tied
across pipeline stages, drifted apart).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires
from syncheck.diagnose.history import smaller_set
from syncheck.diagnose.selection import ranks_outside
from syncheck.diagnose.statements import limit_facts
from syncheck.messages import Sentence

CODE = "SYN105"
SLUG = "tie-broken"
SEVERITY = "info"
CERTAINTY = "proved"
_MOST = 3  # ties


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "Weights that share memory on some ranks are separate tensors with separate gradients on other ranks."
    FIX = "Tie the weights on every rank after building, loading or resizing the model, and before wrapping it."
    TIED_ON_SOME = "{names:names} share memory on {tied:ranks}, but not on {separate:ranks}"
    MORE_TIES = "{count:count more tie}"


def _has_broken_ties(case: Case) -> bool:
    """Whether names share memory on some ranks only."""
    return bool(case.group.ties)


@requires(_has_broken_ties)
def apply(case: Case) -> Match | None:
    """Report which names are tied on which ranks; cover no tensor.

    The smaller set of ranks is suspect, or all ranks if both sets are equally large.
    """
    ties, ranks = case.group.ties, case.group.ranks
    facts = []
    for tie in ties:
        fact = Text.TIED_ON_SOME(
            names=tie.names,
            tied=tie.ranks,
            separate=ranks_outside(ranks, tie.ranks),
        )
        facts.append(fact)
    tied_ranks = set(ties[0].ranks)
    suspects = smaller_set(tied_ranks, set(ranks) - tied_ranks)
    return Match((), suspects, limit_facts(facts, _MOST, Text.MORE_TIES))
