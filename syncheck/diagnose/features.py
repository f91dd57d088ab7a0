"""Features of the tensors and values of a finding: kinds, reasons, sizes, and which ranks agree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.measures import TOUCHED, agrees_within, is_share_below
from syncheck.layout.replica_groups import TENSOR_PARALLEL

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

    from syncheck.diagnose.case import Case
    from syncheck.records import TensorDiff, ValueDiff


def with_reason(diffs: Iterable[TensorDiff], *reasons: str) -> list[TensorDiff]:
    """Return the tensors that were not compared for one of the reasons: `missing` or `shape`, for example."""
    return [diff for diff in diffs if diff.reason in reasons]


def kinds_of(diffs: Iterable[TensorDiff]) -> set[str]:
    """Return the kinds of tensors."""
    return {diff.kind for diff in diffs}


def extents_of(diffs: Iterable[TensorDiff]) -> set[str | None]:
    """Return which parts of the tensors differ: `one` element, `contiguous` elements, `all` or `scattered`."""
    return {diff.extent for diff in diffs}


def select_numbers(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors of a single element."""
    return [diff for diff in diffs if diff.numel == 1]


def exclude_numbers(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors of several elements."""
    return [diff for diff in diffs if diff.numel > 1]


def with_agreeing_ranks(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors of which any two ranks hold equal bytes."""
    # The largest set of ranks is first.
    return [diff for diff in diffs if diff.clusters and len(diff.clusters[0]) > 1]


def agreeing_within(diffs: Iterable[TensorDiff], locations: Mapping[int, Hashable]) -> list[TensorDiff]:
    """Return the tensors that differ only between locations. locations: by rank, a host or a mesh coordinate."""
    return [diff for diff in diffs if agrees_within(diff, locations)]


def agreeing_along_tensor_parallel(diffs: Iterable[TensorDiff], case: Case) -> list[TensorDiff]:
    """Return the tensors that differ only between tensor-parallel coordinates; empty unless the ranks have several."""
    coordinates = case.coordinates(TENSOR_PARALLEL)
    has_several = len(set(coordinates.values())) > 1
    return agreeing_within(diffs, coordinates) if has_several else []


def states_of_parameters(case: Case, names: Iterable[str], parameters: Collection[str]) -> list[str]:
    """Return the names of optimizer tensors that belong to one of the parameters."""
    return [name for name in names if case.owner_of(name) in parameters]


def owners_of_states(case: Case, *kinds: str) -> frozenset[str]:
    """Return the parameters with optimizer tensors of the kinds, equal tensors included."""
    return frozenset(map(case.owner_of, case.names_of(*kinds)))


def lost_values(values: Iterable[ValueDiff]) -> list[ValueDiff]:
    """Return the values whose container some ranks lack."""
    return [value for value in values if value.lost]


def are_numbered(names: Collection[str]) -> bool:
    """Whether the parameters of an optimizer are known by their numbers instead of their names."""
    return all(map(str.isdigit, names))


def hits_of(damages: Iterable[list[TensorDiff]]) -> list[TensorDiff]:
    """Return the damaged tensors, without the tensors that follow each of them; see `localized_damage`."""
    return [hit for hit, *_ in damages]


def groups_of(diff: TensorDiff, ranks: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Return the replica groups of a tensor; all of its ranks if it has a single group. ranks: of the tensor."""
    return diff.replica_groups or (tuple(sorted(ranks)),)


def single_out_ranks(case: Case, diffs: Iterable[TensorDiff]) -> bool:
    """Whether in each tensor, one set of ranks agrees, and each other rank differs from all ranks.

    Gradients that are never averaged leave no two ranks equal, and an average over a part of the ranks leaves several
    sets. Tensors with several replica groups do not count, because such a group may be averaged alone.
    """
    number = case.number_of_ranks
    for diff in diffs:
        # Without further sets of several ranks, each other rank is a set.
        agreeing = max(map(len, diff.clusters), default=0)
        are_others_alone = len(diff.clusters) == 1 + number - agreeing
        has_one_set = 1 < agreeing < number and are_others_alone
        if not has_one_set or len(groups_of(diff, case.group.ranks)) > 1:
            return False
    return True


def change_whole_parameters(case: Case) -> bool:
    """Whether the differing parameters differ in more than a few elements, unlike after damage or with a mask."""
    return not is_share_below(case.differing_parameters().values(), TOUCHED)
