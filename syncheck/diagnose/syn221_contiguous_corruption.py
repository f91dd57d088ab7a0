"""A run of adjacent elements of a tensor differs, and all other elements agree.

Signature: the differing elements are adjacent in memory, more than one and at most half of the tensor. No other tensor
differs, except its optimizer state within the same elements. If more than half of a tensor differs, unequal initial
values also explain it: the padding row of an embedding is zero on all ranks.

The finding is likely only if the optimizer state of the tensor was compared and agrees, a single tensor is affected,
and the elements are not whole rows. Otherwise, code on some ranks explains the elements as well: a hook or a mask that
keeps rows from being updated changes the optimizer state of the same rows, and rows may be filled or edited.

Cause: a copy or a transfer delivered other bytes (to or from a GPU, between hosts, from a checkpoint), or something
overwrote the memory. If an all-reduce delivers other bytes to one rank, the run is in the parameter and in its
optimizer state. Whole rows of a matrix also differ if each rank added or filled them on its own (the embeddings of new
tokens), or if a hook or a mask on some ranks sets their gradients to zero.

Fix: unless the finding is likely, look first for code that masks, fills or edits the elements on some ranks. Copy the
parameters and optimizer state of a rank in the majority. Without a majority, the healthy rank is closer to the last
checkpoint in sync. Compare right after loading and after the first steps, to see when the difference returns. Check the
memory, links and local storage of the odd host. Broadcast new rows (`dist.broadcast(weight.data, 0)`). If
ranks hold different shards, copy only the damaged tensors, because the checkpoint of another rank has other shards.

Incidents: NVIDIA/Megatron-LM#5281 (a corrupt local checkpoint on one rank, with no integrity check).
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.bn import running_statistics
from syncheck.diagnose.features import agreeing_along_tensor_parallel, extents_of, hits_of, kinds_of, owners_of_states
from syncheck.diagnose.localized import Localized, follower_facts, localized_damage, rest_facts
from syncheck.diagnose.measures import count_mismatched, evidence_of
from syncheck.diagnose.selection import has_kind, minorities_of
from syncheck.diagnose.sentences import choose_unsure_fix
from syncheck.diagnose.statements import element_name, largest_difference
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Case, Match
    from syncheck.records import TensorDiff

CODE = "SYN221"
SLUG = "contiguous-corruption"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Adjacent elements were corrupted on one rank at once: a copy or a transfer delivered other bytes, or "
        "something overwrote the memory."
    )
    CAUSE_UNSURE = (
        "Adjacent elements differ: some ranks did not update them (a gradient hook, a mask), filled or edited them on "
        "their own, or hold corrupted values."
    )
    FIX_UNSURE = (
        "Look for code that masks, fills or edits the elements or their gradients on some ranks only. Without such "
        "code, check the memory, links and storage of the odd host. Then load the checkpoint of a healthy rank on the "
        "odd rank: `model.load_state_dict(torch.load(FILE)['model'])`, and its optimizer state too."
    )
    IN_A_JOB_UNSURE = (
        "Look for code that masks, fills or edits the elements or their gradients on some ranks only. Without such "
        "code, check the memory, links and storage of the odd host. Then call "
        "`syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, with a healthy rank."
    )
    FIX_PARTS_UNSURE = (
        "Look for code that masks, fills or edits the elements or their gradients on some ranks only. Otherwise "
        "check the memory, links and storage of the odd host. Then copy only the named tensors and optimizer "
        "state from the file of a healthy rank that must hold the same values: "
        "`model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])`. The whole checkpoint has "
        "other shards."
    )
    FIX_PARTS = (
        "Copy only the named tensors and optimizer state from the file of a rank in the majority: "
        "`model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])`. The whole checkpoint has "
        "other shards. Check the memory, links and storage of the odd host."
    )
    FIX_PARTS_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare the elements with the last checkpoint in sync: the healthy rank "
        "is closer to it. Then copy only the named tensors and optimizer state from the file of the healthy "
        "rank: `model.get_parameter(NAME).data.copy_(torch.load(FILE)['model'][NAME])`. The whole checkpoint has "
        "other shards. Check memory, links and storage."
    )
    FIX = (
        "Load the checkpoint of a rank in the majority on the odd rank: "
        "`model.load_state_dict(torch.load(FILE)['model'])`, and its optimizer state too. Check the memory, links and "
        "storage of the odd host."
    )
    IN_A_JOB = (
        "Copy the values of a rank in the majority: `syncheck.live.resync(model, optimizer)` on all ranks. "
        "Check the memory, links and storage of the odd host."
    )
    FIX_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare the elements with the last checkpoint in sync: the healthy rank "
        "is closer to it. Then load the checkpoint of the healthy rank on the other rank: "
        "`model.load_state_dict(torch.load(FILE)['model'])`, and its optimizer state too. Check memory, links and "
        "storage."
    )
    IN_A_JOB_NO_MAJORITY = (
        "No majority shows the healthy rank. Compare the elements with the last checkpoint in sync: the healthy rank "
        "is closer to it. Then call `syncheck.live.resync(model, optimizer, source=RANK)` on all ranks, with the "
        "healthy rank. Check memory, links and storage."
    )
    RUN = "{length} adjacent elements of {name:name} differ ({numel} in total)"
    POSITION = "they are elements {first} to {last} in C order"
    ONE_ROW = "exactly row {first}, so it is also consistent with a row filled by each rank on its own"
    ROWS = "exactly rows {first} to {last}, so it is also consistent with rows filled by each rank on its own"


class _Rows(NamedTuple):
    """The first and the last row of the elements, if they are whole rows."""

    first: int
    last: int


def apply(case: Case) -> Match | None:
    """Match runs of adjacent elements if nothing else differs."""
    damages = localized_damage(case)
    if not _have_run(damages) or _are_rows_of_each_rank(case, damages):
        return None

    tensors = list(chain(*damages))
    facts: list[Message] = []
    for hit, *followers in damages:
        facts += _list_facts(hit, followers)
    facts.append(largest_difference(tensors))
    match = case.make_match(tensors, [*facts, *rest_facts(case)])
    if len(damages) == 1 and _is_likely(damages[0], case):
        return match
    fix = choose_unsure_fix(Text, case)
    return match.with_cause(Text.CAUSE_UNSURE, fix).as_consistent(*_list_alternatives(tensors, case))


def _have_run(damages: list[list[TensorDiff]]) -> bool:
    """Whether the damaged elements are runs of adjacent elements, or single elements beside a run."""
    return extents_of(hits_of(damages)) in ({"contiguous"}, {"contiguous", "one"})


def _are_rows_of_each_rank(case: Case, damages: list[list[TensorDiff]]) -> bool:
    """Whether each rank filled its own rows of codebooks or queues."""
    hits = hits_of(damages)
    buffers = [hit for hit in hits if hit.kind == "buffer" or hit.name in case.loose]
    are_statistics = len(hits) == len(buffers) == len(running_statistics(case, buffers))
    return are_statistics and not minorities_of(buffers)


def _is_likely(damage: list[TensorDiff], case: Case) -> bool:
    """Whether corruption explains the elements better than code that fills, masks or edits them."""
    hit, *followers = damage
    # Gradients differed in these elements.
    has_other_gradients = has_kind(followers, "optimizer")
    if has_other_gradients or _is_written_by_code(hit):
        return False
    if hit.kind == "optimizer":
        return case.compared("parameter") > 0
    # Without optimizer state, nothing shows that the gradients were equal.
    return hit.kind == "parameter" and hit.name in owners_of_states(case, "optimizer")


def _is_written_by_code(hit: TensorDiff) -> bool:
    """Whether the elements are whole rows, or at an unknown position, as after an assignment."""
    return evidence_of(hit).first is None or _rows_of(hit) is not None


def _list_alternatives(tensors: Sequence[TensorDiff], case: Case) -> tuple[str, ...]:
    """Return the causes that fit as well, by the kinds of the tensors."""
    kinds = kinds_of(tensors)
    if kinds.isdisjoint({"parameter", "optimizer"}):
        return ("SYN219",) if kinds == {"ema"} else ("SYN205", "SYN218")
    # A gradient of zero in some steps changes the optimizer state. Without state, nothing excludes it.
    may_have_changed_gradients = "optimizer" in kinds or not case.compared("optimizer")
    if may_have_changed_gradients:
        # Each tensor-parallel rank may have computed its own gradient of a replicated tensor.
        unsynchronized = ("SYN231",) if agreeing_along_tensor_parallel(tensors, case) else ()
        return ("SYN225", "SYN213", "SYN210", *unsynchronized)
    return ("SYN210",)


def _list_facts(hit: TensorDiff, followers: Sequence[TensorDiff]) -> list[Message]:
    """State which elements differ, and whether they are whole rows."""
    if hit.extent == "one":
        summary = Localized.ONE_ELEMENT(element=element_name(hit), numel=hit.numel)
        return [summary, *follower_facts(followers)]

    length = count_mismatched(hit)
    return [
        Text.RUN(
            length=length,
            name=hit.name,
            numel=hit.numel,
        ),
        *_position_facts(evidence_of(hit).first, length),
        *follower_facts(followers),
        *_row_facts(hit),
    ]


def _position_facts(first: int | None, length: int) -> tuple[Message, ...]:
    """State the first and the last element of a run, if they are known."""
    if first is None:
        return ()
    return (Text.POSITION(first=first, last=first + length - 1),)


def _row_facts(hit: TensorDiff) -> tuple[Message, ...]:
    """State that the elements are whole rows of a matrix. The rows of a vector are its elements, in any run."""
    rows = _rows_of(hit)
    if rows is None or len(hit.shape) < 2:
        return ()
    if rows.first == rows.last:
        return (Text.ONE_ROW(first=rows.first),)
    return (Text.ROWS(first=rows.first, last=rows.last),)


def _rows_of(hit: TensorDiff) -> _Rows | None:
    """Return the first and the last row if the elements are whole rows; the rows of a vector are its elements."""
    first, length = evidence_of(hit).first, count_mismatched(hit)
    if first is None or not hit.shape:
        return None
    elements_of_row = hit.numel // hit.shape[0]
    begins_within = first % elements_of_row > 0
    ends_within = length % elements_of_row > 0
    if begins_within or ends_within:
        return None
    return _Rows(first // elements_of_row, (first + length) // elements_of_row - 1)
