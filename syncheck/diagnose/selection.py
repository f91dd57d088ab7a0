"""Selections of tensors: by kind, by name, and by the ranks that hold equal bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from syncheck.records import Comparison, TensorDiff, ValueDiff


def with_status(diffs: Iterable[TensorDiff], status: str) -> list[TensorDiff]:
    """Return the tensors with a status: `different` or `not_compared`, for example."""
    return [diff for diff in diffs if diff.status == status]


def list_names(diffs: Iterable[TensorDiff]) -> tuple[str, ...]:
    """Return the names of tensors, in their order."""
    return tuple(diff.name for diff in diffs)


def list_value_names(values: Iterable[ValueDiff]) -> tuple[str, ...]:
    """Return the names of Python values, in their order."""
    return tuple(value.name for value in values)


def select_kinds(diffs: Iterable[TensorDiff], *kinds: str) -> list[TensorDiff]:
    """Return the tensors of the kinds."""
    return [diff for diff in diffs if diff.kind in kinds]


def exclude_kinds(diffs: Iterable[TensorDiff], *kinds: str) -> list[TensorDiff]:
    """Return the tensors of all other kinds."""
    return [diff for diff in diffs if diff.kind not in kinds]


def count_kinds(diffs: Iterable[TensorDiff], *kinds: str) -> int:
    """Return the number of tensors of the kinds."""
    return len(select_kinds(diffs, *kinds))


def has_kind(diffs: Iterable[TensorDiff], *kinds: str) -> bool:
    """Whether any of the tensors is of the kinds."""
    return any(diff.kind in kinds for diff in diffs)


def select_names(diffs: Iterable[TensorDiff], names: Collection[str]) -> list[TensorDiff]:
    """Return the tensors with these names."""
    return [diff for diff in diffs if diff.name in names]


def exclude_names(diffs: Iterable[TensorDiff], names: Collection[str]) -> list[TensorDiff]:
    """Return the tensors with any other name."""
    return [diff for diff in diffs if diff.name not in names]


def modules_of(diffs: Iterable[TensorDiff]) -> set[str]:
    """Return the modules of tensors."""
    return {module_of(diff.name) for diff in diffs}


def select_missing(diffs: Iterable[TensorDiff], *kinds: str) -> list[TensorDiff]:
    """Return the tensors of the kinds that some ranks lack."""
    return [diff for diff in select_kinds(diffs, *kinds) if diff.reason == "missing"]


def out_of_sync(group: Comparison, *kinds: str) -> list[TensorDiff]:
    """Return the tensors of the kinds that are out of sync, whatever rule explains them; without kinds, all."""
    # Also tensors that a rule has covered: they still show what happened to the ranks.
    differing = [diff for diff in group.tensors if diff.out_of_sync]
    if kinds:
        return select_kinds(differing, *kinds)
    return differing


def join_ranks(sets: Iterable[Iterable[int]]) -> set[int]:
    """Return all ranks of several sets."""
    return set().union(*sets)


def ranks_outside(ranks: Iterable[int], excluded: Collection[int]) -> tuple[int, ...]:
    """Return the ranks that are not excluded, in their order."""
    return tuple(rank for rank in ranks if rank not in excluded)


def minorities_of(diffs: Iterable[TensorDiff]) -> set[int]:
    """Return the ranks outside the majority of any tensor."""
    return join_ranks(diff.minority for diff in diffs)


def holders_of(diffs: Iterable[TensorDiff]) -> set[int]:
    """Return the ranks that hold any of the tensors."""
    holders: set[int] = set()
    for diff in diffs:
        holders |= join_ranks(diff.clusters)
    return holders


def differing_elements(diffs: Iterable[TensorDiff]) -> int:
    """Return the number of different elements of all tensors, as far as they were counted."""
    # Digests show that bytes differ, but not how many elements.
    counted = [diff.mismatched for diff in diffs if diff.mismatched is not None]
    return sum(counted)


def union_of(sets: Iterable[Iterable[str]]) -> set[str]:
    """Return all names of several sets."""
    return set().union(*sets)


def last_part(name: str) -> str:
    """Return the last part of a dotted name: 'weight' for 'layer1.fc.weight'."""
    return name.rpartition(".")[2]


def module_of(name: str) -> str:
    """Return the name without its last part: 'layer1.fc' for 'layer1.fc.weight'; empty without dots."""
    return name.rpartition(".")[0]


def ends_with_number(name: str) -> bool:
    """Whether the last part of a dotted name is a position in a list."""
    return last_part(name).isdecimal()
