"""Compare what a checkpoint holds beside tensors: progress, settings, the scaler's state, notes."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any

from syncheck.messages import Note
from syncheck.names import is_random
from syncheck.records import ValueDiff
from syncheck.value_kinds import SCALES, is_own, value_kinds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

# Lines that tell of what some ranks lack; each of a thousand ranks may have something of its own.
_MOST_NOTES = 3


def compare_values(
    snapshots: Mapping[int, Snapshot],
    wanted: Callable[[str, str], bool],
    kept: Callable[[str, str], bool],
    is_partial: Callable[[str], bool],
) -> list[ValueDiff]:
    """List the Python values that are not equal on all replicas.

    A difference counts unless the value is a rank's own, such as its host or random number state, or the options
    exclude it. A note, which neither its name nor its container identifies as progress, a setting or a scaler's state,
    counts in memory and is only listed between files. A setting or a scaler's state that some files lack counts if
    they lack its whole container, or have another class of it, and a loss scale always. In memory every missing value
    counts.

    wanted: whether a name and kind is asked for; kept: whether it is not excluded. is_partial: whether a value belongs
    to a part of the optimizer that not every rank has.
    """
    memory = in_memory(snapshots)
    values = {rank: _values(snapshot) for rank, snapshot in snapshots.items()}
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank, of in values.items():
        for name, value in of.items():
            if not is_partial(name):
                by_name[name][rank] = value
    kind_of, keys = value_kinds(by_name), cache(lambda rank: _containers((*values[rank], *snapshots[rank].tensors)))
    one_format = len({snapshot.format for snapshot in snapshots.values()}) == 1
    diffs = []
    for name, found in by_name.items():
        listed = list(found.values())
        differ = any(value != listed[0] and not (value != value and listed[0] != listed[0]) for value in listed[1:])
        lacking = [rank for rank in snapshots if rank not in found]
        if not differ and not lacking:
            continue
        kind = kind_of(name)
        lost = tuple(rank for rank in lacking if _owner(name) not in keys(rank))
        # Two replicas may know the members of a group in two ways, by name and by position.
        missing = bool(lacking) and not is_membership(name)
        if not memory:
            # With --only-params, a file of the model alone lacks nothing.
            missing = missing and wanted(name, "optimizer")
            missing = missing and one_format and kind in ("setting", "scaler")
            no_scale = name.rpartition(".")[2] in SCALES  # fairseq keeps it in the optimizer's state, and nothing else
            missing = missing and (bool(lost) or no_scale or _differ(name, keys(next(iter(found))), map(keys, lacking)))
        asked = kept(name, "value") if kind != "other" else memory and wanted(name, "value")
        # A rank's own loss in LBFGS's state may differ, but not be lost with the state.
        own = is_own(name) and not (lost and name.startswith("optimizer."))
        counts = (differ or missing) and asked and not own
        by_rank = {rank: found.get(rank) for rank in snapshots}
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
    """Name what a value belongs to: the optimizer, the scheduler, a top-level key."""
    head, groups, _ = name.partition(".param_groups.")
    return head if groups else name.rpartition(".")[0] or name


def _differ(name: str, having: Mapping[str, set[str]], lacking: Iterable[Mapping[str, set[str]]]) -> bool:
    """Whether a rank that lacks a value lacks its container, or has keys in it that the rank that has it lacks.

    A container with fewer keys is of another version of the library. having, lacking: keys by container.
    """
    home = name.rpartition(".")[0]
    found = [keys.get(home) for keys in lacking]
    return not all(found) or any(of - having[home] for of in found if of)


def in_memory(snapshots: Mapping[int, Snapshot]) -> bool:
    """Whether all replicas are things in memory, and none is a file."""
    return all(snapshot.format == "memory" for snapshot in snapshots.values())


def note_absent_values(snapshots: Mapping[int, Snapshot], diffs: Sequence[ValueDiff]) -> list[Message]:
    """Return notes on values that some files of one format lack and that do not count. diffs: of all values."""
    if len({snapshot.format for snapshot in snapshots.values()}) > 1 or in_memory(snapshots):
        return []
    tops = {rank: {name.partition(".")[0] for name in snapshot.values} for rank, snapshot in snapshots.items()}
    counted = {diff.name.partition(".")[0] for diff in diffs if diff.counts}
    gone: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for top in sorted(set().union(*tops.values()) - counted):
        ranks = tuple(rank for rank, of in tops.items() if top not in of)
        if ranks and not is_random((top,)):
            gone[ranks].append(top)
    notes = [
        Note.VALUES_ABSENT(ranks=ranks, names=tuple(f"{name:.80}" for name in names))
        for ranks, names in list(gone.items())[:_MOST_NOTES]
    ]
    more = sum(map(len, list(gone.values())[_MOST_NOTES:]))
    return notes + ([Note.MORE_VALUES_ABSENT(count=more)] if more else [])


def is_membership(name: str) -> bool:
    """Whether a value lists the parameters of one of an optimizer's groups."""
    parts = name.split(".")
    return parts[0] == "optimizer" and parts[-1] in ("params", "(positions)") and parts[-3:-2] == ["param_groups"]


def has_counted_values(snapshot: Snapshot) -> bool:
    """Whether a checkpoint holds Python values that make a group out of sync when they differ."""
    return any(value is not None for value in select_counted_values(snapshot).values())


def select_counted_values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the Python values of a checkpoint that make a group out of sync when they differ."""
    values = _values(snapshot)
    kind_of = value_kinds(values)
    return {name: value for name, value in values.items() if kind_of(name) != "other" and not is_own(name)}


def stores_progress(snapshot: Snapshot) -> bool:
    """Whether a checkpoint says at which step or epoch it was written."""
    values = _values(snapshot)
    kind_of = value_kinds(values)
    return any(value is not None and kind_of(name) == "progress" for name, value in values.items())


def _values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the values of a checkpoint, those of its metadata where it has no others of that name."""
    progress = {"step": snapshot.metadata.step, "epoch": snapshot.metadata.epoch} if snapshot.metadata else {}
    return {name: value for name, value in progress.items() if value is not None} | dict(snapshot.values)
