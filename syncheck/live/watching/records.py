"""The records of a step on the board: their keys, and what they show of ranks that did not step as other ranks did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.live.witnesses.rules import Seen
from syncheck.live.witnesses.witness import Suspicion, find_minority

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The keys of a record beside the keys of the witnesses.
RANK = "r"
SIGNATURE = "p"
NO_STEP = "x"
REPEATED = "e"
# Why a rank tells of a step that its optimizer did not take.
SKIPPED = "skipped"
INFINITE = "infinite"


def compare_steps(number: int, ranks: Sequence[int], records: Mapping[int, Mapping[str, Any]]) -> list[Suspicion]:
    """Return SYN214, SYN216 or SYN410 if ranks did not step as other ranks did.

    number: of the reduction.
    ranks: of the clock. A rank without a record has gone on to a later reduction.
    """
    reasons = {rank: records.get(rank, {NO_STEP: SKIPPED}).get(NO_STEP) for rank in ranks}
    suspicions = []
    for reason, code, sentence in ((INFINITE, "SYN216", Seen.INFINITE), (SKIPPED, "SYN214", Seen.SKIPPED)):
        suspects = tuple(rank for rank in ranks if reasons[rank] == reason)
        # If no rank steps, as in accumulation, none deviates.
        if 0 < len(suspects) < len(ranks):
            suspicions.append(Suspicion(code, suspects, (sentence(ranks=suspects, reduction=number),)))
    # A rank that goes around the wrapper steps once more than the other ranks between two reductions.
    repeated = {rank: records[rank].get(REPEATED, 0) for rank in sorted(records)}
    if len(set(repeated.values())) > 1:
        fact = Seen.REPEATED(steps=repeated, reduction=number)
        suspicions.append(Suspicion("SYN410", find_minority(repeated), (fact,), variant="_LOCAL"))
    return suspicions
