"""Compare the Python values of checkpoints: progress, settings, loss scaler state, and other values."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

from syncheck.comparison.model_values import ModelValues, are_equal
from syncheck.layout.optimizer_shards import OptimizerShards
from syncheck.layout.replica_groups import DIFFERENT_PARAMETERS, coordinates_in
from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.snapshots import get_metadata
from syncheck.tensors.kinds import make_selector
from syncheck.tensors.names import is_rng_state
from syncheck.tensors.value_kinds import (
    SCALES,
    differs_by_design,
    is_lbfgs_state,
    is_membership,
    list_containers,
    make_value_classifier,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

# Maximum number of notes about absent values: each of a thousand ranks may lack different values.
_MOST_NOTES = 3


def compare_values(
    alignment: Alignment,
    is_selected: Callable[[str, str], bool],
    exclude: tuple[str, ...],
    *,
    strict: bool,
) -> list[ValueDiff]:
    """Return the diffs of Python values between replicas.

    Different values count as out of sync, except values of the rank itself (like its host or RNG state) and excluded
    values. Values of the model count like tensors. If `strict`, as for replicas in memory, other values of kind `other`
    and missing values count. Otherwise, as in files, values of kind `other` are only listed, and missing settings and
    scaler state count if their whole container is missing or has another class. A missing loss scale always counts, and
    so does every value with another structure on some ranks: a number on one rank, and a dict or list on another.

    is_selected: whether the options select a name and kind.
    exclude: globs of names that do not count.
    """
    values = _Values(
        alignment,
        is_selected,
        exclude,
        strict=strict,
    )
    diffs = []
    for name in values.by_name:
        diff = values.compare(name)
        if diff is not None:
            diffs.append(diff)

    return diffs


class _Values:
    """The values of a group by name and rank, without values of partitioned optimizer state."""

    def __init__(
        self,
        alignment: Alignment,
        is_selected: Callable[[str, str], bool],
        exclude: tuple[str, ...],
        *,
        strict: bool,
    ) -> None:
        snapshots = alignment.snapshots
        values_by_rank = {rank: values_of(snapshot) for rank, snapshot in snapshots.items()}
        partial_values = _PartialValues(alignment)
        self.by_name: dict[str, dict[int, Any]] = defaultdict(dict)
        # The names of values other than None.
        self._plain_names: dict[int, set[str]] = defaultdict(set)
        for rank, values in values_by_rank.items():
            for name, value in values.items():
                if partial_values.includes(name):
                    continue

                self.by_name[name][rank] = value
                if value is not None:
                    self._plain_names[rank].add(name)

        self._plain_anywhere = set[str]().union(*self._plain_names.values())

        @cache
        def find_keys(rank: int) -> dict[str, set[str]]:
            names = (*values_by_rank[rank], *snapshots[rank].tensors)
            return _list_keys(names)

        # Most groups have no absent value, and need no containers.
        self._containers = find_keys
        self._ranks = alignment.ranks
        self._kind_of = make_value_classifier(self.by_name)
        self._has_one_format = len(_list_formats(snapshots)) == 1
        self._of_model = ModelValues(alignment)
        self._is_selected = is_selected
        self._is_included = make_selector(frozenset(), (), exclude)
        self._strict = strict

    def compare(self, name: str) -> ValueDiff | None:
        """Return the diff of a value; None if all ranks have equal values."""
        by_rank = self.by_name[name]
        if self._is_of_model(name, by_rank):
            # The options select by kind: parts of the model are parameters or buffers.
            selected = self._is_selected(name, "parameter") or self._is_selected(name, "buffer")
            return self._of_model.compare(name, by_rank, selected=selected)

        first, *other_values = by_rank.values()
        differs = not all(are_equal(value, first) for value in other_values)
        absent_ranks = [rank for rank in self._ranks if rank not in by_rank]
        if not differs and not absent_ranks:
            return None

        restructured_ranks = self._find_restructured(name, absent_ranks)
        if restructured_ranks:
            return ValueDiff(
                name,
                dict.fromkeys(self._ranks) | by_rank,
                counts=True,
                kind=self._kind_of(name),
                lost=restructured_ranks,
            )

        owner = _get_owner(name)
        lost_ranks = tuple(rank for rank in absent_ranks if owner not in self._containers(rank))
        is_lost = len(lost_ranks) > 0
        is_out_of_sync = differs or self._must_not_be_missing(name, absent_ranks, is_lost=is_lost)
        return ValueDiff(
            name,
            dict.fromkeys(self._ranks) | by_rank,
            counts=is_out_of_sync and self._counts(name, is_lost=is_lost),
            kind=self._kind_of(name),
            lost=lost_ranks,
        )

    def _find_restructured(self, name: str, absent_ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks that hold another structure in place of a value, if this counts.

        They hold a dict or list with its name, or a plain value with the name of one of its containers. None has no
        structure, because it stands for a value that a rank does not have.

        absent_ranks: ranks without the value.
        """
        # Other formats may store another structure.
        if not self._has_one_format:
            return ()

        if not self._counts_restructured(name):
            return ()

        containers = list_containers(name)
        restructured_ranks = []
        for rank in absent_ranks:
            has_plain_container = not self._plain_names[rank].isdisjoint(containers)
            has_keys = bool(self._containers(rank).get(name))
            if has_plain_container or (has_keys and name in self._plain_anywhere):
                restructured_ranks.append(rank)

        return tuple(restructured_ranks)

    def _counts_restructured(self, name: str) -> bool:
        """Whether the options and the name of a value let another structure count, whatever its kind.

        A rank may have another loss or time than other ranks, but the same program saves the same structure.
        """
        if differs_by_design(name):
            return False

        if self._kind_of(name) != "other":
            return self._is_included(name, "value")

        return self._is_selected(name, "value")

    def _is_of_model(self, name: str, by_rank: Mapping[int, Any]) -> bool:
        """Whether a value is compared like a tensor."""
        if not self._of_model.includes(name, by_rank):
            return False

        # A step or a setting in a state dict must not be missing, while an attribute like the momentum of a BatchNorm
        # may be. Their differences have findings of their own.
        return self._kind_of(name) == "other" or self._of_model.lacks(name, by_rank)

    def _counts(self, name: str, *, is_lost: bool) -> bool:
        """Whether the options and the kind of a value let its differences count.

        is_lost: whether ranks lack its whole object.
        """
        # The loss in LBFGS state differs by design, but must not be missing.
        is_lost_state = is_lost and name.startswith("optimizer.")
        if differs_by_design(name) and not is_lost_state:
            return False

        if self._kind_of(name) != "other":
            return self._is_included(name, "value")

        # In files, values of an unknown meaning are only listed.
        if not self._strict:
            return False

        return self._is_selected(name, "value")

    def _must_not_be_missing(self, name: str, absent_ranks: Sequence[int], *, is_lost: bool) -> bool:
        """Whether a value that some ranks lack is missing there. is_lost: whether they lack its whole object."""
        # Replicas may list the members of a parameter group by name or by position.
        if is_membership(name):
            return False

        if self._strict:
            return True

        # Other formats may store tensors only.
        if not self._has_one_format:
            return False

        # If only parameters are selected, files without an optimizer are complete.
        if not self._is_selected(name, "optimizer"):
            return False

        kind = self._kind_of(name)
        if kind not in ("setting", "scaler") and not is_lbfgs_state(name):
            return False

        if is_lost:
            return True

        # fairseq stores the scale in the optimizer state, without a container.
        last = name.rpartition(".")[2]
        if last in SCALES:
            return True

        first_rank = next(iter(self.by_name[name]))
        absent = [self._containers(rank) for rank in absent_ranks]
        return _container_differs(name, self._containers(first_rank), absent)


class _PartialValues:
    """The values of a partitioned optimizer: group memberships, and values of single shards.

    Pipeline stages and ranks with other experts have different members too, but ranks with equal coordinates must have
    the same.
    """

    def __init__(self, alignment: Alignment) -> None:
        self._optimizer = alignment.optimizer
        self._is_sharded = self._optimizer != OptimizerShards()
        self._stages: dict[Hashable, list[Snapshot]] = defaultdict(list)
        for snapshot in alignment.snapshots.values():
            self._stages[coordinates_in(snapshot, DIFFERENT_PARAMETERS)].append(snapshot)
            if get_metadata(snapshot).optimizer_sharded:
                self._is_sharded = True

    def includes(self, name: str) -> bool:
        """Whether ranks may have different values of this name by design."""
        if self._optimizer.may_hold(name, of_optimizer=False):
            return True

        # A step counter that is no tensor.
        parameter = name.rpartition(".")[0]
        if parameter in self._optimizer.owned:
            return True

        if not is_membership(name):
            return False

        if self._is_sharded:
            return True

        # Memberships that differ within a stage are not due to the stages.
        return len(self._stages) > 1 and self._is_equal_in_stages(name)

    def _is_equal_in_stages(self, name: str) -> bool:
        for snapshots in self._stages.values():
            values = [snapshot.values.get(name) for snapshot in snapshots]
            if values.count(values[0]) < len(values):
                return False

        return True


def _list_keys(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the keys of each container of values and tensors."""
    keys: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if is_membership(name):
            continue

        # A value is a container without keys.
        keys.setdefault(name, set())
        container, _, key = name.rpartition(".")
        # Each container is a key of the container around it.
        while container:
            keys[container].add(key)
            container, _, key = container.rpartition(".")

    return dict(keys)


def _get_owner(name: str) -> str:
    """Return the name of the object of a value: the optimizer, the scheduler, or a top-level key."""
    optimizer, groups, _ = name.partition(".param_groups.")
    if groups:
        return optimizer

    container = name.rpartition(".")[0]
    return container or name


def _container_differs(name: str, present: Mapping[str, set[str]], absent: Collection[Mapping[str, set[str]]]) -> bool:
    """Whether the container of a missing value is missing, too, or has additional keys.

    If it only has fewer keys, another version of the library wrote it. present, absent: keys by container on a rank
    with the value and on ranks without it.
    """
    container = name.rpartition(".")[0]
    for keys_by_container in absent:
        keys = keys_by_container.get(container)
        if not keys:
            return True

        # A container of another class has keys of its own.
        if keys - present[container]:
            return True

    return False


def _list_formats(snapshots: Mapping[int, Snapshot]) -> set[str]:
    return {snapshot.format for snapshot in snapshots.values()}


def note_absent_values(snapshots: Mapping[int, Snapshot], diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes about absent top-level values whose absence does not count. Only for files of the same format."""
    formats = _list_formats(snapshots)
    if len(formats) > 1 or "memory" in formats:
        return []

    absent = _find_absent_tops(snapshots, diffs)
    notes: list[Message] = []
    for ranks in list(absent)[:_MOST_NOTES]:
        names = absent.pop(ranks)
        notes.append(Note.VALUES_ABSENT(ranks=ranks, names=tuple(names)))

    unnamed = sum(map(len, absent.values()))
    return [*notes, *note_if(unnamed, Note.MORE_VALUES_ABSENT(count=unnamed))]


def _find_absent_tops(
    snapshots: Mapping[int, Snapshot], diffs: Sequence[ValueDiff]
) -> dict[tuple[int, ...], list[str]]:
    """Return the first parts of the names of absent values by the ranks without them, unless their absence counts."""
    present: dict[str, set[int]] = defaultdict(set)
    for rank, snapshot in snapshots.items():
        for name, value in snapshot.values.items():
            top = _get_top(name)
            # None at the top stands for an object that the rank does not have.
            if value is None and name == top:
                continue

            present[top].add(rank)

    # Differences that count are in a finding, and values of the model have notes of their own.
    counted = {_get_top(diff.name) for diff in diffs if diff.counts or diff.kind == "model"}
    absent: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for top in sorted(present.keys() - counted):
        absent_ranks = tuple(rank for rank in snapshots if rank not in present[top])
        if not is_rng_state((top,)):
            absent[absent_ranks].append(f"{top:.80}")

    # Values that all ranks have.
    absent.pop((), None)
    return absent


def _get_top(name: str) -> str:
    return name.partition(".")[0]
