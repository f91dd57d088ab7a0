"""A run of adjacent elements of a tensor differs, and all other elements agree.

Signature: the differing elements are adjacent in memory, more than one and at most half of the tensor. No other tensor
differs, except its optimizer state within the same elements. If more than half of a tensor differs, unequal initial
values also explain it: the padding row of an embedding is zero on all ranks.

Cause: a copy or a transfer delivered other bytes (to or from a GPU, between hosts, from a checkpoint), or something
overwrote the memory. If an all-reduce delivers other bytes to one rank, the run is in the parameter and in its
optimizer state. Whole rows of a matrix also differ if each rank added or filled them on its own (the embeddings of new
tokens).

Fix: copy the parameters and optimizer state of a rank in the majority. Without a majority, the healthy rank is closer
to the last checkpoint in sync. Compare right after loading and after the first steps, to see when the difference
returns. Check the memory, links and local storage of the odd host. Broadcast new rows
(`dist.broadcast(weight.data, 0)`).

Incidents: NVIDIA/Megatron-LM#5281 (a corrupt local checkpoint on one rank, with no integrity check).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from syncheck.diagnose.bn import running_statistics
from syncheck.diagnose.case import Case, Match, element_name, evidence_of, largest_difference
from syncheck.diagnose.localized import Localized, follower_facts, localized_damage, rest_facts
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff

CODE = "SYN221"
SLUG = "contiguous-corruption"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "Adjacent elements were corrupted on one rank at once: a copy or a transfer delivered other bytes, or "
        "something overwrote the memory."
    )
    FIX = (
        "Load the checkpoint of a rank in the majority on the odd rank: "
        "model.load_state_dict(torch.load(FILE)['model']), and its optimizer state too. Check the memory, links and "
        "storage of the odd host."
    )
    IN_A_JOB = (
        "Copy the values of a rank in the majority: syncheck.live.resync(model, optimizer) on all ranks. "
        "Check the memory, links and storage of the odd host."
    )
    FIX_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare the elements with the last checkpoint in sync: the healthy rank "
        "is closer to it. Then load the checkpoint of the healthy rank on the other rank: "
        "model.load_state_dict(torch.load(FILE)['model']), and its optimizer state too. Check memory, links and "
        "storage."
    )
    IN_A_JOB_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare the elements with the last checkpoint in sync: the healthy rank "
        "is closer to it. Then call syncheck.live.resync(model, optimizer, source=RANK) on all ranks, with the healthy "
        "rank. Check memory, links and storage."
    )
    RUN = "{length} adjacent elements of {name} differ ({numel} in total)"
    POSITION = "they are elements {first} to {last} in C order"
    ONE_ROW = "exactly row {first}, so it is also consistent with a row filled by each rank on its own"
    ROWS = "exactly rows {first} to {last}, so it is also consistent with rows filled by each rank on its own"


def apply(case: Case) -> Match | None:
    """Match runs of adjacent elements if nothing else differs."""
    damages = localized_damage(case)
    extents = {hit.extent for hit, *_ in damages}
    if "contiguous" not in extents or not extents <= {"one", "contiguous"}:
        return None
    buffers = [hit for hit, *_ in damages if hit.name in case.loose or hit.kind == "buffer"]
    # Each rank fills its own rows of codebooks and queues.
    only_buffers = len(buffers) == len(damages) == len(running_statistics(case, buffers))
    if only_buffers and not any(diff.minority for diff in buffers):
        return None
    tensors = list(chain(*damages))
    facts = [fact for damage in damages for fact in _facts(*damage)]
    facts.append(largest_difference(tensors))
    return case.make_match(tensors, [*facts, *rest_facts(case)])


def _facts(hit: TensorDiff, *followers: TensorDiff) -> list[Message]:
    """State which elements differ, and whether they are whole rows."""
    if hit.extent == "one":
        return [Localized.ONE_ELEMENT(element=element_name(hit), numel=hit.numel), *follower_facts(followers)]
    first, length = evidence_of(hit).first, hit.mismatched or 0
    facts = [Text.RUN(length=length, name=hit.name, numel=hit.numel)]
    if first is not None:
        facts.append(Text.POSITION(first=first, last=first + length - 1))
    facts += follower_facts(followers)
    row = hit.numel // hit.shape[0] if len(hit.shape) > 1 else 0
    if first is not None and row > 1 and first % row == length % row == 0:
        low, high = first // row, (first + length) // row - 1
        facts.append(Text.ONE_ROW(first=low) if low == high else Text.ROWS(first=low, last=high))
    return facts
