"""Localized differences: a few elements of a few tensors, while the rest of the model agrees."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import count_mismatched, evidence_of
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.selection import exclude_kinds, exclude_names, list_names
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

    Each group begins with the tensor with the most differing elements; if equal, with the parameter. Behind it are its
    optimizer state and averaged copies, differing within the same elements.

    Tensors covered by an earlier rule are ignored. Running statistics are ignored too, unless a single bit of them
    differs, because different batches may change few of many channels.
    """
    differing = _select_differing(case)
    if not all(map(_is_in_part, differing)):
        return []

    names = frozenset(list_names(differing))
    damages: dict[str, list[TensorDiff]] = defaultdict(list)
    for diff in differing:
        damages[_owner(diff, names)].append(diff)
    # More damaged tensors have a cause that affects all tensors.
    if len(damages) > MOST:
        return []

    ordered_damages = []
    for damage in damages.values():
        hit, *followers = sorted(damage, key=_damage_order)
        if not all(_is_within(follower, hit) for follower in followers):
            return []
        ordered_damages.append([hit, *followers])
    return ordered_damages


def _select_differing(case: Case) -> list[TensorDiff]:
    """Return the differences that damage may explain."""
    differing = exclude_kinds(case.tensors, *_OF_BATCHES)
    if not differing and len(case.tensors) == 1:
        # A single bit of a running statistic is damage, unlike other differences of batches.
        differing = list(filter(is_one_bit, case.tensors))
    # Buffers may depend on each rank's data, and have rules of their own.
    of_model = exclude_names(exclude_kinds(differing, "buffer"), case.loose)
    return of_model or differing


def _damage_order(diff: TensorDiff) -> tuple[int, bool]:
    """Sort the tensors of a damage: most differing elements first, and the optimizer last."""
    return -count_mismatched(diff), diff.kind == "optimizer"


def _is_in_part(diff: TensorDiff) -> bool:
    """Whether at most half of the elements differ.

    False for constants of code. False if several replica groups differ, because the numbers describe only the group
    with the largest difference.
    """
    if diff.status != "different" or diff.reason is not None:
        return False
    # Other code has other constants, of which one element may differ.
    if not diff.mismatched or is_code_constant(diff.name):
        return False
    return 2 * diff.mismatched <= diff.numel and len(sets_within(diff)) < 2


def _owner(diff: TensorDiff, names: Collection[str]) -> str:
    """Return the parameter of optimizer state or of an averaged copy, else the tensor's own name."""
    if diff.kind == "optimizer":
        return parameter_of(diff.name)
    if diff.kind != "ema":
        return diff.name
    # A copy has the name of its parameter behind the names of its modules.
    parts = diff.name.split(".")
    tails = [".".join(parts[begin:]) for begin in range(1, len(parts))]
    parameters = [tail for tail in tails if tail in names]
    return parameters[0] if parameters else diff.name


def _is_within(follower: TensorDiff, hit: TensorDiff) -> bool:
    """Whether the element with the largest difference of a follower is damaged."""
    if follower.shape != hit.shape:
        return False
    if hit.extent == "one":
        return follower.extent == "one" and follower.index == hit.index
    first = evidence_of(hit).first
    if first is None:
        return True
    position = ravel_index(follower.index, follower.shape)
    return first <= position < first + count_mismatched(hit)


def find_flipped(damage: Iterable[TensorDiff]) -> TensorDiff | None:
    """Return the first tensor of a damage with a single differing bit; None if more bits differ in all of them."""
    for diff in damage:
        if is_one_bit(diff):
            return diff
    return None


def is_one_bit(diff: TensorDiff) -> bool:
    """Whether a single bit of a single element differs."""
    return diff.extent == "one" and evidence_of(diff).flipped_bits == 1


def follower_facts(followers: Iterable[TensorDiff]) -> tuple[Message, ...]:
    """State which other tensors differ in the same elements; empty if no tensor does."""
    names = tuple(diff.name for diff in sorted(followers, key=lambda diff: diff.kind != "optimizer"))
    if names:
        return (Localized.FOLLOWERS(tensors=names),)
    return ()


def rest_facts(case: Case) -> tuple[Message, ...]:
    """State how many parameters and optimizer tensors agree apart from the damage; empty if nothing was compared."""
    parameters, states = case.compared("parameter"), case.compared("optimizer")
    if parameters and states:
        return (Localized.REST_AGREES(parameters=parameters, states=states),)
    if parameters:
        return (Localized.PARAMETERS_AGREE(parameters=parameters),)
    if states:
        return (Localized.STATES_AGREE(states=states),)
    return ()
