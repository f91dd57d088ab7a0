"""Compare the Python values of checkpoints: progress, settings, loss scaler state, and other values."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

from syncheck.comparison.model_values import ModelValues
from syncheck.messages import Note
from syncheck.records import ValueDiff
from syncheck.tensors.names import is_rng_state
from syncheck.tensors.value_kinds import (
    SCALES,
    differs_by_design,
    is_lbfgs_state,
    is_membership,
    make_value_classifier,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

# Maximum number of notes about absent values: each of a thousand ranks may lack different values.
_MOST_NOTES = 3


def compare_values(
    alignment: Alignment,
    wanted: Callable[[str, str], bool],
    kept: Callable[[str, str], bool],
    is_partial: Callable[[str], bool],
    *,
    strict: bool,
) -> list[ValueDiff]:
    """Return the diffs of Python values between replicas.

    Different values count as out of sync, except values of the rank itself (like its host or RNG state) and excluded
    values. Values of the model count like tensors. If `strict`, as for replicas in memory, other values of kind `other`
    and missing values count. Otherwise, as in files, values of kind `other` are only listed, and missing settings and
    scaler state count if their whole container is missing or has another class. A missing loss scale always counts.

    wanted: whether the options select a name and kind. kept: whether the options do not exclude it. is_partial: whether
    a value belongs to partitioned optimizer state.
    """
    snapshots = alignment.snapshots
    values = {rank: values_of(snapshot) for rank, snapshot in snapshots.items()}
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank, own in values.items():
        for name, value in own.items():
            if not is_partial(name):
                by_name[name][rank] = value
    kind_of, keys = (
        make_value_classifier(by_name),
        cache(lambda rank: _containers((*values[rank], *snapshots[rank].tensors))),
    )
    one_format = len({snapshot.format for snapshot in snapshots.values()}) == 1
    of_model = ModelValues(alignment)
    diffs = []
    for name, present in by_name.items():
        # A step or a setting in a state dict must not be missing, and its differences have findings of their own.
        if of_model.includes(name, present) and (kind_of(name) == "other" or of_model.lacks(name, present)):
            # `wanted` selects by kind: parts of the model are parameters or buffers.
            selected = wanted(name, "parameter") or wanted(name, "buffer")
            diff = of_model.compare(name, present, selected=selected)
            diffs += [] if diff is None else [diff]
            continue
        first, *rest = present.values()
        differ = any(value != first and not (value != value and first != first) for value in rest)  # NaN equals NaN
        absent = [rank for rank in snapshots if rank not in present]
        if not differ and not absent:
            continue
        kind = kind_of(name)
        lost = tuple(rank for rank in absent if _owner(name) not in keys(rank))
        # Replicas may list the members of a parameter group by name or by position.
        missing = bool(absent) and not is_membership(name)
        if not strict:
            # If only parameters are selected, files without an optimizer are complete.
            missing = missing and wanted(name, "optimizer")
            missing = missing and one_format and (kind in ("setting", "scaler") or is_lbfgs_state(name))
            is_scale = (
                name.rpartition(".")[2] in SCALES
            )  # fairseq stores it in the optimizer state, without a container
            missing = missing and (
                bool(lost) or is_scale or _container_differs(name, keys(next(iter(present))), map(keys, absent))
            )
        selected = kept(name, "value") if kind != "other" else strict and wanted(name, "value")
        # The loss in LBFGS state differs by design, but must not be missing.
        by_design = differs_by_design(name) and not (lost and name.startswith("optimizer."))
        counts = (differ or missing) and selected and not by_design
        by_rank = {rank: present.get(rank) for rank in snapshots}
        diffs.append(ValueDiff(name, by_rank, counts=counts, kind=kind, lost=lost))
    return diffs


def _containers(names: Iterable[str]) -> dict[str, set[str]]:
    """Return the keys of each container of values and tensors."""
    keys: dict[str, set[str]] = defaultdict(set)
    for name in names:
        head, key = name, ""
        while head:
            if not is_membership(name):
                keys[head].add(key)
            head, _, key = head.rpartition(".")
    return {head: found - {""} for head, found in keys.items()}


def _owner(name: str) -> str:
    """Return the name of the object of a value: the optimizer, the scheduler, or a top-level key."""
    head, groups, _ = name.partition(".param_groups.")
    return head if groups else name.rpartition(".")[0] or name


def _container_differs(name: str, present: Mapping[str, set[str]], absent: Iterable[Mapping[str, set[str]]]) -> bool:
    """Whether the container of a missing value is missing, too, or has additional keys.

    If it only has fewer keys, another version of the library wrote it. present, absent: keys by container on a rank
    with the value and on ranks without it.
    """
    container = name.rpartition(".")[0]
    keys = [by_container.get(container) for by_container in absent]
    return not all(keys) or any(own - present[container] for own in keys if own)


def in_memory(snapshots: Mapping[int, Snapshot]) -> bool:
    """Whether all replicas are objects in memory."""
    return all(snapshot.format == "memory" for snapshot in snapshots.values())


def note_absent_values(snapshots: Mapping[int, Snapshot], diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes about absent top-level values whose absence does not count. Only for files of the same format."""
    if len({snapshot.format for snapshot in snapshots.values()}) > 1 or in_memory(snapshots):
        return []
    tops = {rank: {name.partition(".")[0] for name in snapshot.values} for rank, snapshot in snapshots.items()}
    counted = {diff.name.partition(".")[0] for diff in diffs if diff.counts or diff.kind == "model"}
    absent: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for top in sorted(set().union(*tops.values()) - counted):
        ranks = tuple(rank for rank, own in tops.items() if top not in own)
        if ranks and not is_rng_state((top,)):
            absent[ranks].append(top)
    notes = [
        Note.VALUES_ABSENT(ranks=ranks, names=tuple(f"{name:.80}" for name in names))
        for ranks, names in list(absent.items())[:_MOST_NOTES]
    ]
    more = sum(map(len, list(absent.values())[_MOST_NOTES:]))
    return notes + ([Note.MORE_VALUES_ABSENT(count=more)] if more else [])
