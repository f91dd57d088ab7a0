"""Explanations, and those of tensors that program and definition do not train alike: frozen, tied and untied."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.parity import sentences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.findings import Certainty
    from syncheck.messages import Message
    from syncheck.parity.patterns import Pattern, Situation


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why tensors are wrong.

    facts: the evidence.
    certainty: of the finding.
    alternatives: codes of other causes that fit.
    ranks: suspects; empty for all ranks.
    parameters: of the sentence of the cause.
    variant: end of the names of other sentences than CAUSE and FIX, for example `_FROZEN`.
    """

    facts: Sequence[Message]
    certainty: Certainty = "proved"
    alternatives: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""


def match_untied(_situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match a tensor of the definition that is several parameters of the program with different gradients."""
    if not pattern.untied:
        return None
    text = sentences.PartialNotReduced
    [name] = pattern.names
    return Explanation([text.UNTIED(name=name, names=pattern.untied)], variant="_UNTIED")


def explain_tied(tied: Mapping[int, Mapping[str, str]]) -> Explanation:
    """Return which parameters of the definition are one in the program.

    tied: by rank, the first name of a parameter by its other names.
    """
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, first_names in tied.items():
        for pair in first_names.items():
            ranks_of[pair].append(rank)
    facts = []
    for (name, first), ranks in ranks_of.items():
        facts.append(sentences.PartialNotReduced.TIED(name=name, first=first, ranks=tuple(ranks)))
    # Ranks without ties are right.
    return Explanation(facts, ranks=tuple(filter(tied.get, tied)), variant="_TIED")


def match_frozen(situation: Situation, pattern: Pattern) -> Explanation | None:
    """Match tensors that either the definition or the program freezes."""
    text = sentences.SummedOrAveraged
    names = situation.sort(pattern.names)
    if pattern.is_extra:
        trained = situation.list_wrong_ranks(names)
        return Explanation([text.EXTRA(ranks=trained, names=names)], ranks=trained, variant="_FROZEN")
    if pattern.frozen:
        return Explanation([text.FROZEN(ranks=pattern.frozen, names=names)], ranks=pattern.frozen, variant="_FROZEN")
    return None
