"""One model holds a part of the other model several times.

Signature: all rows of B are rows of A, bit by bit, but some rows occur several times: the whole tensor or a part is
repeated, or each block of rows, so that B has more rows, or that other rows of A are missing. Or the reverse.

Cause: a merge joined copies that every rank holds as if they were shards, a conversion repeated the key and value heads
of grouped-query attention for a library without it, or each rank saved the part of the first rank.

Fix: keep one copy of tensors that every rank holds, and join only shards. If B is meant for a library that needs
repeated heads, pass `--allow SYN317`.

Incidents: verl-project/verl#7612 (replicated buffers were concatenated by the merge).
"""

from __future__ import annotations

from syncheck.diagnose.case import Case, Match, limit_facts, parameters_of
from syncheck.findings import RelationKind
from syncheck.messages import Sentence

CODE = "SYN317"
SLUG = "repeated"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "One model holds tensors, or parts of tensors, of the other model several times."
    FIX = "Save and join the shards of all ranks: copies have taken the place of other rows of A, which are lost."
    FIX_LONGER = (
        "Join only shards, and keep one copy of what every rank holds. If repeated heads are intended, pass "
        "{allow:option=SYN317}."
    )
    WHOLE = "{side} has {times} copies of {name} of {other}, along dimension {dim}"
    PART = "{side} has {times} copies of indices {first} to {last} of dimension {dim} of {name} of {other}"
    EACH = "{side} has each block of {size:count index|indices} of dimension {dim} of {name} of {other} {times} times"
    OTHER = "{side} has rows of {name} of {other} several times, and lacks {missing:count row} with other values"
    MORE = "{count:count more tensor}"


def apply(case: Case) -> Match | None:
    """Match tensors with several copies of a part."""
    found = case.related(RelationKind.REPEATED)
    if not found:
        return None
    facts = []
    for diff in found:
        own = dict(parameters_of(diff))
        pattern, first = own.pop("pattern"), own.pop("start", 0)
        own |= {"name": diff.name, "other": "A" if own["side"] == "B" else "B"}
        if pattern == "other":
            facts.append(Text.OTHER(**own))
        elif pattern == "each":
            facts.append(Text.EACH(**own))
        elif own.pop("whole", 0):
            facts.append(Text.WHOLE(**own))
        else:
            facts.append(Text.PART(first=first, last=first + own["size"] - 1, **own))
    # With more rows than the other model, nothing is lost.
    fix = Text.FIX_LONGER if all(diff.reason == "shape" for diff in found) else None
    return Match(found, case.group.ranks, limit_facts(facts, 4, Text.MORE), fix=fix)
