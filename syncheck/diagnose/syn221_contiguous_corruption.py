"""A run of adjacent elements of a tensor differs, and all else agrees.

Signature: the elements that differ lie next to each other in memory, more than one and at most half of the tensor, and
no other tensor differs but its optimizer's state, within the same elements. (Where more than half of a tensor differs,
another start of the run explains it as well: an embedding whose padding row is zero everywhere.)

Cause: a copy or a transfer brought other bytes: to or from a GPU, between hosts, from a checkpoint; or something wrote
over the memory. An all-reduce that delivers other bytes to one rank leaves such a run in the parameter and in all of
its optimizer's state. Whole rows of a matrix are seen too where rows were added, or filled, on each rank by itself: new
tokens of an embedding.

Fix: take the parameters and the optimizer's state of a rank that agrees with the others, and compare right after
loading and after the first steps to see when it comes back. Suspect that host's memory, its links and its local
storage. New rows: broadcast them (`dist.broadcast(weight.data, 0)`).

Incidents: NVIDIA/Megatron-LM#5281 (a corrupt local checkpoint on one rank, with no check of its integrity).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.bn import running_statistics
from syncheck.diagnose.case import Match, agreement_text, gap_text, place_text
from syncheck.diagnose.spots import agreeing_text, also_there_text, spots
from syncheck.evidence.suspects import suspects

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.diagnose.spots import Spot
    from syncheck.records import Severity

CODE = "SYN221"
SLUG = "contiguous-corruption"
SEVERITY: Severity = "error"
CAUSE = (
    "Adjacent elements went wrong on one rank at once: a copy or a transfer brought other bytes, or something wrote "
    "over the memory."
)
FIX = (
    "Load the file of a rank that agrees with the others on the odd one: "
    "model.load_state_dict(torch.load(FILE)['model']), its optimizer too. Check that host's memory, links and storage."
)
IN_A_JOB = (
    "Copy from a rank that agrees with the others: syncheck.live.resync(model, optimizer) on all ranks, with "
    "source=RANK where there is no majority. Check that host's memory, links and storage."
)


def apply(case: Case) -> Match | None:
    """Fit runs of adjacent elements that differ alone."""
    found = spots(case)
    extents = {spot.hit.extent for spot in found}
    if "contiguous" not in extents or not extents <= {"one", "contiguous"}:
        return None
    hits = [spot.hit for spot in found if spot.hit.name in case.loose or spot.hit.kind == "buffer"]
    if len(hits) == len(found) == len(running_statistics(case, hits)) and not any(hit.minority for hit in hits):
        return None  # rows of codebooks and queues, which each rank fills
    tensors = tuple(diff for spot in found for diff in spot.tensors)
    text = "; ".join(map(_text, found))
    return Match(
        tensors,
        suspects(tensors, case.group),
        f"{text}; {gap_text(tensors)}{agreeing_text(case)}{agreement_text(tensors, case.group)}",
        fix=IN_A_JOB if case.in_memory else "",
    )


def _text(spot: Spot) -> str:
    hit = spot.hit
    first, length = hit.evidence.first if hit.evidence else None, hit.mismatched or 0
    if hit.extent == "one":
        return f"one element of {hit.numel} differs in {place_text(hit)}{also_there_text(spot)}"
    text = f"{length} adjacent elements of {hit.numel} differ in {hit.name}"
    if first is None:
        return text + also_there_text(spot)
    text += f", from {first} to {first + length - 1} in C order{also_there_text(spot)}"
    row = hit.numel // hit.shape[0] if len(hit.shape) > 1 else 0
    if row > 1 and first % row == length % row == 0:
        low, high = first // row, (first + length) // row - 1
        rows = f"row {low}" if low == high else f"rows {low} to {high}"
        text += f" (exactly {rows}, so it is also consistent with rows that each rank filled by itself)"
    return text
