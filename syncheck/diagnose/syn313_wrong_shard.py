"""A rank or stage of B holds the shard or layer of another one.

Signature: shards of B equal other shards of A, bit by bit, or a tensor of B equals the tensor of another layer or
module of A.

Cause: files of ranks were copied or renamed wrongly, ranks were sorted as text (10 before 2), pipeline stages number
their layers from 0, or a conversion assembled shards in the wrong order.

Fix: assemble shards by the rank inside the files, not by the order of file names, and add the offset of the stage to
the numbers of layers.

Incidents: KempnerInstitute/KempnerForge#202 (the experts of one rank were saved for all ranks). Sorting `rank_10`
before `rank_2` is the most common form.
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN313"
SLUG = "wrong-shard"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "Shards, layers or other tensors of B are at the wrong place: they are those of another rank, layer or module "
        "of A."
    )
    FIX = (
        "Assemble shards by their rank and layer, not by the order of file names, and check the names of modules in "
        "the conversion."
    )
    OTHER = "{name} of B is {other} of A"
    TRANSPOSED = "{name} of B is {other} of A, transposed"
    BOXES = "{boxes} of {of} shards of {name} belong to other ranks, in {files}"
    MORE = "{count:count more tensor}"


def apply(case: Case) -> Match | None:
    """Match tensors with the shards or layers of other ranks."""
    found = case.related(RelationKind.SHARD)
    facts = []
    for diff in found:
        own = parameters_of(diff)
        if "other" not in own:
            facts.append(Text.BOXES(name=diff.name, boxes=own["boxes"], of=own["of"], files=own["files"]))
        elif "dims" in own:
            facts.append(Text.TRANSPOSED(name=diff.name, other=own["other"]))
        else:
            facts.append(Text.OTHER(name=diff.name, other=own["other"]))
    return Match(found, case.group.ranks, limit_facts(facts, 4, Text.MORE)) if found else None
