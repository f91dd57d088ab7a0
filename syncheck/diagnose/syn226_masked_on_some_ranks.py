"""Parameters were pruned, masked or clamped on some ranks only, or differently on each rank.

Signature: parameters differ only in elements that are zero on one of two ranks. These elements are scattered over the
tensor, and the other elements of the tensor are not zero and agree. The optimizer state of the same parameters may
differ too. Or only masks differ: `weight_mask` beside `weight_orig` (torch.nn.utils.prune), or other buffers called
mask. A tensor that is zero as a whole does not match, because zero is also a usual initial value.

Cause: pruning on some ranks only (`if rank == 0:`), a random mask from each rank's own generator, a threshold from
statistics of each rank's own batches, or a projection such as `weight.clamp_(min=0)` on some ranks. Each rank then
trains and saves another model, and the averaged gradients belong to none of them.

Fix: compute the mask once, and copy it to all ranks, or compute it from values that are equal on all ranks, before DDP
wraps the model, and clamp on every rank. Then copy parameters, buffers and the optimizer state from a rank with the
right values. Unequal optimizer state would make the parameters differ again after the next steps.

Incidents: neuralmagic/sparseml#429 (masks from each rank's generator), microsoft/nni#5205 (each rank prunes by its own
batches).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.diagnose.conditions import state_if
from syncheck.diagnose.measures import count_mismatched, evidence_of
from syncheck.diagnose.selection import differing_elements, exclude_names, last_part, list_names, select_kinds
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.messages import Message, Sentence
from syncheck.records import sets_within
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.diagnose.case import Case, Match
    from syncheck.records import TensorDiff

CODE = "SYN226"
SLUG = "masked-on-some-ranks"
SEVERITY = "error"
CERTAINTY = "likely"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = (
        "Elements were set to zero, by pruning, a mask or a clamp, on some ranks only, or other elements on each rank."
    )
    FIX = (
        "Compute the mask once, or from values that are equal on all ranks, before DDP wraps the model. Prune and "
        "clamp on every rank. Then copy model and optimizer from a rank with the right values: `state = "
        "[model.state_dict(), optimizer.state_dict()]`; `torch.distributed.broadcast_object_list(state, rank)`; "
        "`model.load_state_dict(state[0])`; `optimizer.load_state_dict(state[1])`."
    )
    FIX_PARTS = (
        "Compute the mask once, or from values that are equal on all ranks that hold the same shard, before the model "
        "is wrapped. Prune and clamp on all ranks with this shard. Then copy only the named tensors and the optimizer "
        "state from a rank with the right values and the same shard. The whole state of another rank has other shards."
    )
    ZEROS = (
        "{count:count parameter} {count:verb differs|differ} only in elements that are zero on {ranks:ranks} "
        "({names:names}), {elements} of {total:count element}, {size}"
    )
    OWN_MASKS = "each of {ranks:ranks} has zeros in other elements"
    MASKS = "the ranks have different masks in {count:count tensor} ({names:names})"
    WEIGHTS_AGREE = "the masked parameters themselves agree"


_MASK = re.compile(r"(?:\w+_)?masks?")
# Number of differing elements from which zeros are no coincidence.
_FEWEST = 8
# Share of elements, with room for rounding of the sum of two shares.
_ALL = 1 - 1e-9


def apply(case: Case) -> Match | None:
    """Match parameters that differ only in zeros on one side, and masks."""
    differing = case.differing("parameter", "buffer")
    masks = [diff for diff in differing if _is_mask(diff.name)]
    weights = select_kinds(exclude_names(differing, list_names(masks)), "parameter")
    states = case.of_kind("optimizer")
    if not _explain(
        case,
        weights=weights,
        masks=masks,
        states=states,
    ):
        return None

    # The outputs of masked layers change the running statistics of later layers.
    covered = (*weights, *masks, *states, *case.of_kind(*BN_STATISTICS, "ema"))
    facts = [
        *_describe_weights(weights),
        *_describe_masks(masks, weights),
        *follower_facts(covered),
    ]
    match = case.make_match([*weights, *masks], facts, covered)
    # Other modules call a buffer mask, too, and may update it from each rank's own data.
    are_of_pruning = all(_is_pruning(case, diff.name) for diff in masks)
    return match if weights or are_of_pruning else match.as_consistent("SYN205")


def _explain(
    case: Case, weights: Sequence[TensorDiff], masks: Sequence[TensorDiff], states: Sequence[TensorDiff]
) -> bool:
    """Whether masks explain the differences of the parameters and of the optimizer state."""
    # The state of other parameters would have another cause.
    if not case.owners_of(states).issubset(list_names(weights)):
        return False
    if not weights:
        return bool(masks)
    return _are_zeroed(weights) and _is_scattered(weights)


def _is_mask(name: str) -> bool:
    """Whether a tensor is called mask."""
    return _MASK.fullmatch(last_part(name)) is not None


def _is_pruning(case: Case, name: str) -> bool:
    """Whether a mask is one of torch.nn.utils.prune."""
    return f"{name.removesuffix('_mask')}_orig" in case.group.evidence.names


def _are_zeroed(weights: Iterable[TensorDiff]) -> bool:
    """Whether every differing element is zero on one of two replicas."""
    for diff in weights:
        zeroed = evidence_of(diff).zeroed
        for clusters in sets_within(diff):
            if not _is_zero_on_one_side(clusters, zeroed):
                return False
    return True


def _is_zero_on_one_side(clusters: Sequence[Sequence[int]], zeroed: Mapping[int, float]) -> bool:
    """Whether every differing element is zero in the first cluster or in the cluster compared with it.

    zeroed: by rank, the share of the differing elements that are zero.
    """
    first, *further = [zeroed.get(ranks[0], 0.0) for ranks in clusters]
    # An element that differs from a zero is no zero, so the shares of two ranks have no element in common.
    return first + min(further) >= _ALL


def _is_scattered(weights: Sequence[TensorDiff]) -> bool:
    """Whether the zeros are a part of tensors with other elements, and no damaged run of elements."""
    has_many = differing_elements(weights) >= _FEWEST
    return has_many and any(map(_is_partial, weights))


def _is_partial(diff: TensorDiff) -> bool:
    """Whether a scattered part of the elements differs."""
    is_scattered = diff.extent not in ("one", "contiguous", "all")
    return is_scattered and count_mismatched(diff) < diff.numel


def _describe_weights(weights: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State which parameters differ in zeros, and on which ranks."""
    ranks_with_zeros: set[int] = set()
    elements = 0
    largest_share = 0.0
    for diff in weights:
        zeroed = evidence_of(diff).zeroed
        ranks_with_zeros.update(zeroed)
        elements += diff.numel
        largest_share = max([largest_share, *zeroed.values()])

    ranks = tuple(sorted(ranks_with_zeros))
    zeros = Text.ZEROS(
        count=len(weights),
        ranks=ranks,
        names=list_names(weights),
        elements=differing_elements(weights),
        total=elements,
        size=largest_difference(weights),
    )
    # No rank holds all of the zeros.
    are_own_masks = largest_share < _ALL and len(ranks) > 1
    return state_if(weights, zeros, *state_if(are_own_masks, Text.OWN_MASKS(ranks=ranks)))


def _describe_masks(masks: Sequence[TensorDiff], weights: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State which masks differ, and that the parameters agree if none differs."""
    differing = Text.MASKS(count=len(masks), names=list_names(masks))
    return state_if(masks, differing, *state_if(not weights, Text.WEIGHTS_AGREE()))
