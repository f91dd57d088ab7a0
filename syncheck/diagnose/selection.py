"""Selections of tensors: by kind, by name, and by the ranks that hold equal bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from syncheck.records import Comparison, TensorDiff, ValueDiff

# Tensors and Python values are selected in the same way.
Diff = TypeVar("Diff", "TensorDiff", "ValueDiff")
_Group = TypeVar("_Group", bound="Comparison")


class _Named(Protocol):
    """A record with the name of a tensor or value."""

    @property
    def name(self) -> str:
        """The name in the checkpoint."""


def with_status(diffs: Iterable[TensorDiff], status: str) -> list[TensorDiff]:
    """Return the tensors with a status: `different` or `not_compared`, for example."""
    return [diff for diff in diffs if diff.status == status]


def list_names(diffs: Iterable[_Named]) -> tuple[str, ...]:
    """Return the names of tensors, Python values or counters, in their order."""
    return tuple(diff.name for diff in diffs)


def index_by_name(diffs: Iterable[Diff]) -> dict[str, Diff]:
    """Return tensors or Python values by name."""
    return {diff.name: diff for diff in diffs}


def select_counting(values: Iterable[ValueDiff]) -> list[ValueDiff]:
    """Return the Python values that make a group out of sync."""
    return [value for value in values if value.counts]


def select_kinds(diffs: Iterable[Diff], *kinds: str) -> list[Diff]:
    """Return the tensors or Python values of the kinds."""
    return [diff for diff in diffs if diff.kind in kinds]


def exclude_kinds(diffs: Iterable[TensorDiff], *kinds: str) -> list[TensorDiff]:
    """Return the tensors of all other kinds."""
    return [diff for diff in diffs if diff.kind not in kinds]


def count_kinds(diffs: Iterable[TensorDiff], *kinds: str) -> int:
    """Return the number of tensors of the kinds."""
    return len(select_kinds(diffs, *kinds))


def has_kind(diffs: Iterable[TensorDiff | ValueDiff], *kinds: str) -> bool:
    """Whether any of the tensors or Python values is of the kinds."""
    return any(diff.kind in kinds for diff in diffs)


def problems_of(diff: TensorDiff) -> tuple[TensorDiff, ...]:
    """Return the separate problems of a tensor with several, else the only difference."""
    return diff.facts or (diff,)


def select_names(diffs: Iterable[Diff], names: Collection[str]) -> list[Diff]:
    """Return the tensors or Python values with the given names."""
    return [diff for diff in diffs if diff.name in names]


def exclude_names(diffs: Iterable[Diff], names: Collection[str]) -> list[Diff]:
    """Return the tensors or Python values with any other name."""
    return [diff for diff in diffs if diff.name not in names]


def select_prefixes(diffs: Iterable[Diff], prefixes: tuple[str, ...]) -> list[Diff]:
    """Return the tensors or Python values whose names begin with one of the prefixes."""
    return [diff for diff in diffs if diff.name.startswith(prefixes)]


def modules_of(diffs: Iterable[TensorDiff]) -> set[str]:
    """Return the modules of tensors."""
    return {module_of(diff.name) for diff in diffs}


def select_missing(diffs: Iterable[TensorDiff], *kinds: str) -> list[TensorDiff]:
    """Return the tensors of the kinds that some ranks lack; without kinds, all."""
    missing = [diff for diff in diffs if diff.reason == "missing"]
    return select_kinds(missing, *kinds) if kinds else missing


def select_out_of_sync(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors that are out of sync."""
    return [diff for diff in diffs if diff.out_of_sync]


def out_of_sync(group: Comparison, *kinds: str) -> list[TensorDiff]:
    """Return the tensors of the kinds that are out of sync, whatever rule explains them; without kinds, all."""
    # Also tensors that a rule has covered: they still show what happened to the ranks.
    differing = select_out_of_sync(group.tensors)
    return select_kinds(differing, *kinds) if kinds else differing


def with_step(groups: Iterable[_Group]) -> list[_Group]:
    """Return the groups of known step, in their order."""
    return [group for group in groups if group.step is not None]


def find_largest(diffs: Iterable[TensorDiff]) -> TensorDiff | None:
    """Return the tensor with the largest difference, the first of equal tensors; None if no difference has a number."""
    measured = [diff for diff in diffs if diff.max_abs is not None]
    return max(measured, key=size_of, default=None)


def size_of(diff: TensorDiff) -> float:
    """Return the largest difference of the elements; 0 if it has no number."""
    return 0.0 if diff.max_abs is None else diff.max_abs


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
