"""Experts of B are exchanged, duplicated or lost.

Signature: the tensor of an expert of B equals another expert of A, bit by bit, or B lacks some of the experts of a
layer.

Cause: expert-parallel ranks number their experts from 0, and a conversion used these numbers for the whole
model, saved the experts of one rank only, or ordered the ranks wrongly.

Fix: use the number of the expert in the whole model: rank times experts per rank plus the local number. Check the
number of experts after the conversion.

Incidents: KempnerInstitute/KempnerForge#202 (expert parallelism saves the experts of one rank, and resuming is silent).
"""

from __future__ import annotations

import re

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Message, Sentence

CODE = "SYN310"
SLUG = "expert-misplaced"
SEVERITY = "error"
CERTAINTY = "proved"
_EXPERT = re.compile(r"(.*\bexperts?\.(?:local_experts\.)?)\d+(\..*)")


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "Experts of B are at the wrong place or missing: the conversion numbered or collected them wrongly."
    FIX = "Number experts by rank times experts per rank plus the local number, and save the experts of all ranks."
    OTHER = "{name} of B is {other} of A"
    STACK = "{name} of B has the experts {experts:list} of A"
    TWICE = "{count:count expert tensor} of A {count:verb is|are} in B more than once"
    LOST = "B lacks {count:count expert tensor} of A: {names:names}"
    MORE = "{count:count more tensor}"


def apply(case: Case) -> Match | None:
    """Match tensors of experts."""
    found = case.related(RelationKind.EXPERT)
    missing = [diff for diff in case.tensors if diff.reason == "missing" and diff.clusters == ((0,),)]
    lost = tuple(diff for diff in missing if _has_siblings(diff.name, case))
    if not found and not lost:
        return None
    facts: list[Message] = []
    others: list[object] = []
    for diff in found:
        own = parameters_of(diff)
        if "experts" in own:
            facts.append(Text.STACK(name=diff.name, experts=own["experts"]))
        else:
            facts.append(Text.OTHER(name=diff.name, other=own["other"]))
            others.append(own["other"])
    facts = limit_facts(facts, 4, Text.MORE)
    differing = {diff.name for diff in found}
    if twice := sum(others.count(other) > 1 or other not in differing for other in dict.fromkeys(others)):
        facts.append(Text.TWICE(count=twice))
    if lost:
        facts.append(Text.LOST(count=len(lost), names=tuple(diff.name for diff in lost)))
    return Match((*found, *lost), case.group.ranks, facts)


def _has_siblings(name: str, case: Case) -> bool:
    """Whether both models have the same tensor of another expert."""
    match = _EXPERT.fullmatch(name)
    absent = {diff.name for diff in case.group.tensors if diff.reason == "missing"}
    siblings = (_EXPERT.fullmatch(other) for other in case.group.evidence.names.keys() - absent)
    return match is not None and any(own is not None and own.groups() == match.groups() for own in siblings)
