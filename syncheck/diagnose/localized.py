"""Localized differences: a few elements of a few tensors, while the rest of the model agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.measures import evidence_of
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.messages import Message, Sentence
from syncheck.records import sets_within
from syncheck.snapshots import ravel_index
from syncheck.tensors.kinds import BN_STATISTICS
from syncheck.tensors.names import is_code_constant

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff

# Local running statistics differ anyway, and have rules of their own.
_OF_BATCHES = (*BN_STATISTICS, "bn_count")
# Largest number of damaged tensors. If more tensors differ in a few elements, the cause affects all tensors.
MOST = 4


class Localized(Sentence):
    """Statements about damaged elements, and about the rest of the model."""

    ONE_ELEMENT = "A single element of {numel} differs: {element:name}"
    FOLLOWERS = "{tensors:list} {tensors:verb differs|differ} in the same elements"
    REST_AGREES = "all other elements of {parameters:count parameter} and {states:count optimizer tensor} agree"
    PARAMETERS_AGREE = "all other elements of {parameters:count parameter} agree"
    STATES_AGREE = "all other elements of {states:count optimizer tensor} agree"


def localized_damage(case: Case) -> list[list[TensorDiff]]:
    """Group the differences by damaged tensor. Empty if any difference is not confined to a small part of a tensor.

    Each group begins with the tensor with the most differing elements; if equal, with the parameter. The others are its
    optimizer state and averaged copies, differing within the same elements.

    Tensors covered by an earlier rule are ignored. Running statistics are ignored too, unless a single bit of them
    differs, because different batches may change few of many channels.
    """
    differing = [diff for diff in case.tensors if diff.kind not in _OF_BATCHES]
    if not differing and len(case.tensors) == 1 and is_one_bit(case.tensors[0]):
        differing = list(case.tensors)
    # Buffers may depend on each rank's data, and have rules of their own.
    loose = case.loose
    differing = [diff for diff in differing if diff.kind != "buffer" and diff.name not in loose] or differing
    if not all(_is_in_part(diff) for diff in differing):
        return []
    names = {diff.name for diff in differing}
    by_name: dict[str, list[TensorDiff]] = {}
    for diff in differing:
        by_name.setdefault(_owner(diff, names), []).append(diff)
    damages = [
        sorted(diffs, key=lambda diff: (-(diff.mismatched or 0), diff.kind == "optimizer"))
        for diffs in by_name.values()
    ]
    confined = len(by_name) <= MOST and all(_is_within(other, hit) for hit, *others in damages for other in others)
    return damages if confined else []


def _is_in_part(diff: TensorDiff) -> bool:
    """Whether at most half of the elements differ.

    False for constants of code. False if several replica groups differ, because the numbers describe only the group
    with the largest difference.
    """
    if diff.status != "different" or diff.reason is not None or not diff.mismatched:
        return False
    # Other code has other constants, of which one element may differ.
    if is_code_constant(diff.name):
        return False
    return 2 * diff.mismatched <= diff.numel and len(sets_within(diff)) < 2


def _owner(diff: TensorDiff, names: Collection[str]) -> str:
    """Return the parameter of optimizer state or of an averaged copy, else the tensor's own name."""
    if diff.kind == "optimizer":
        return parameter_of(diff.name)
    if diff.kind == "ema":
        parts = diff.name.split(".")
        tails = (".".join(parts[i:]) for i in range(1, len(parts)))
        return next((tail for tail in tails if tail in names), diff.name)
    return diff.name


def _is_within(other: TensorDiff, hit: TensorDiff) -> bool:
    """Whether the element with the largest difference of a follower is damaged."""
    if other.shape != hit.shape:
        return False
    if hit.extent == "one":
        return other.extent == "one" and other.index == hit.index
    first = evidence_of(hit).first
    return first is None or first <= ravel_index(other.index, other.shape) < first + (hit.mismatched or 0)


def is_one_bit(diff: TensorDiff) -> bool:
    """Whether a single bit of a single element differs."""
    return diff.extent == "one" and evidence_of(diff).flipped_bits == 1


def follower_facts(followers: Iterable[TensorDiff]) -> tuple[Message, ...]:
    """State which other tensors differ in the same elements; empty if no tensor does."""
    names = tuple(diff.name for diff in sorted(followers, key=lambda diff: diff.kind != "optimizer"))
    return (Localized.FOLLOWERS(tensors=names),) if names else ()


def rest_facts(case: Case) -> tuple[Message, ...]:
    """State how many parameters and optimizer tensors agree apart from the damage; empty if nothing was compared."""
    parameters, states = case.compared("parameter"), case.compared("optimizer")
    if parameters and states:
        return (Localized.REST_AGREES(parameters=parameters, states=states),)
    if parameters:
        return (Localized.PARAMETERS_AGREE(parameters=parameters),)
    return (Localized.STATES_AGREE(states=states),) if states else ()
