"""Localized differences: a few elements of a few tensors, while the rest of the model agrees."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import count_mismatched, evidence_of
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.selection import exclude_kinds, exclude_names, list_names, select_kinds
from syncheck.messages import Message, Sentence
from syncheck.records import sets_within
from syncheck.snapshots import ravel_index
from syncheck.tensors.kinds import BN_STATISTICS
from syncheck.tensors.names import is_code_constant

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

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


# The statement about the rest of the model, by the kinds of tensors that were compared.
_REST = {
    frozenset({"parameters", "states"}): Localized.REST_AGREES,
    frozenset({"parameters"}): Localized.PARAMETERS_AGREE,
    frozenset({"states"}): Localized.STATES_AGREE,
}


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
        owner = _owner(diff, names)
        damages[owner].append(diff)
    # More damaged tensors have a cause that affects all tensors.
    if len(damages) > MOST:
        return []

    for damage in damages.values():
        damage.sort(key=_damage_order)
        # A tensor that differs elsewhere shows that the cause is no damage.
        if not _is_one_damage(damage):
            return []
    return list(damages.values())


def _is_one_damage(damage: Sequence[TensorDiff]) -> bool:
    """Whether all tensors of a damage differ within the elements of the first tensor."""
    hit, *followers = damage
    return all(_is_within(follower, hit) for follower in followers)


def _select_differing(case: Case) -> list[TensorDiff]:
    """Return the differences that damage may explain."""
    differing = exclude_kinds(case.tensors, *_OF_BATCHES)
    are_only_statistics = not differing
    if are_only_statistics and len(case.tensors) == 1:
        # A single bit of a running statistic is damage, unlike other differences of batches.
        differing = list(filter(is_one_bit, case.tensors))
    # Buffers may depend on each rank's data, and have rules of their own.
    without_buffers = exclude_kinds(differing, "buffer")
    of_model = exclude_names(without_buffers, case.loose)
    return of_model or differing


def _damage_order(diff: TensorDiff) -> tuple[int, bool]:
    """Sort the tensors of a damage: most differing elements first, and the optimizer last."""
    return -count_mismatched(diff), diff.kind == "optimizer"


def _is_in_part(diff: TensorDiff) -> bool:
    """Whether at most half of the elements differ.

    False for constants of code. False if several replica groups differ, because the numbers describe only the group
    with the largest difference.
    """
    conditions = (
        diff.status == "different",
        diff.reason is None,
        0 < 2 * count_mismatched(diff) <= diff.numel,
        # Other code has other constants, of which one element may differ.
        not is_code_constant(diff.name),
        len(sets_within(diff)) < 2,
    )
    return all(conditions)


def _owner(diff: TensorDiff, names: Collection[str]) -> str:
    """Return the parameter of optimizer state or of an averaged copy, else the tensor's own name."""
    if diff.kind == "optimizer":
        return parameter_of(diff.name)
    if diff.kind != "ema":
        return diff.name
    # A copy has the name of its parameter behind the names of its modules.
    modules_and_parameter = diff.name.split(".")
    for begin in range(1, len(modules_and_parameter)):
        parts = modules_and_parameter[begin:]
        parameter = ".".join(parts)
        if parameter in names:
            return parameter
    return diff.name


def _is_within(follower: TensorDiff, hit: TensorDiff) -> bool:
    """Whether the element with the largest difference of a follower is damaged."""
    if follower.shape != hit.shape:
        return False
    # A single element follows a single element only.
    if hit.extent == "one":
        return (follower.extent, follower.index) == ("one", hit.index)
    first = evidence_of(hit).first
    if first is None:
        return True
    last = first + count_mismatched(hit) - 1
    position = ravel_index(follower.index, follower.shape)
    return first <= position <= last


def find_flipped(damage: Iterable[TensorDiff]) -> TensorDiff | None:
    """Return the first tensor of a damage with a single differing bit; None if more bits differ in all of them."""
    return next(filter(is_one_bit, damage), None)


def is_one_bit(diff: TensorDiff) -> bool:
    """Whether a single bit of a single element differs."""
    is_one_element = diff.extent == "one"
    return is_one_element and evidence_of(diff).flipped_bits == 1


def follower_facts(followers: Iterable[TensorDiff]) -> tuple[Message, ...]:
    """State which other tensors differ in the same elements; empty if no tensor does."""
    followers = list(followers)
    of_optimizer = select_kinds(followers, "optimizer")
    # The optimizer's tensors come first.
    names = list_names((*of_optimizer, *exclude_kinds(followers, "optimizer")))
    return (Localized.FOLLOWERS(tensors=names),) if names else ()


def rest_facts(case: Case) -> tuple[Message, ...]:
    """State how many parameters and optimizer tensors agree apart from the damage; empty if nothing was compared."""
    counts = {
        "parameters": case.compared("parameter"),
        "states": case.compared("optimizer"),
    }
    compared = {name: count for name, count in counts.items() if count}
    if not compared:
        return ()
    sentence = _REST[frozenset(compared)]
    fact = sentence(**compared)
    return (fact,)
