"""Compare what a checkpoint holds beside tensors: step, epoch, learning rates, the scaler's state, notes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.kinds import SCALERS
from syncheck.names import is_random
from syncheck.records import PROGRESS, ValueDiff, names_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from syncheck.snapshots import Snapshot


# What is each rank's own by its name. LBFGS keeps the loss of the rank's own batch as prev_loss.
_OWN = frozenset("rank local_rank global_rank node_rank host hostname device pid prev_loss".split())

# Lines that tell of what some ranks lack; each of a thousand ranks may have something of its own.
_MOST_NOTES = 3


def compare_values(
    snapshots: Mapping[int, Snapshot], wanted: Callable[[str, str], bool], kept: Callable[[str, str], bool]
) -> list[ValueDiff]:
    """List the Python values that are not equal on all replicas.

    Of files, one that some replicas lack does not count against them: the formats hold different ones. Only a whole
    group of an optimizer's parameters does, where such a replica has other groups of that optimizer. In memory all
    hold what they are, so that every value counts, a missing one too, but for random number states, what is a rank's
    own, and what the options leave out. wanted: whether a name and kind is asked for; kept: whether it is not excluded.
    """
    memory = in_memory(snapshots)
    groups = {rank: {_group_of(name) for name in _values(snapshot)} for rank, snapshot in snapshots.items()}
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank, snapshot in snapshots.items():
        for name, value in _values(snapshot).items():
            # Files do not say it in one way, so it would be missing on one side.
            if memory or not is_membership(name):
                by_name[name][rank] = value
    diffs = []
    for name, values in by_name.items():
        listed = list(values.values())
        differ = any(value != listed[0] and not (value != value and listed[0] != listed[0]) for value in listed[1:])
        lacking = len(values) < len(snapshots)
        if not differ and not lacking:
            continue
        # The members of a group are known by name or by position; replicas may know them in different ways.
        lost = lacking and any(_lost(name, groups[rank]) for rank in snapshots.keys() - values.keys())
        stands = differ or lost or (memory and not is_membership(name))
        counts = stands and (_counts_in_memory(name, wanted, kept) if memory else _counts(name))
        diffs.append(ValueDiff(name, {rank: values.get(rank) for rank in snapshots}, counts=counts))
    return diffs


def _group_of(name: str) -> tuple[str, str]:
    """Return the optimizer and the number of the parameter group that a value belongs to; empty where to none."""
    optimizer, inside, rest = name.partition(".param_groups.")
    return (optimizer, rest.partition(".")[0]) if inside else ("", "")


def _lost(name: str, groups: Collection[tuple[str, str]]) -> bool:
    """Whether a value is of a parameter group that a replica lacks, one that has others of that optimizer."""
    of = _group_of(name)
    return any(of) and of not in groups and any(group[0] == of[0] for group in groups)


def in_memory(snapshots: Mapping[int, Snapshot]) -> bool:
    """Whether all replicas are things in memory, and none is a file."""
    return all(snapshot.format == "memory" for snapshot in snapshots.values())


def lacking(snapshots: Mapping[int, Snapshot]) -> list[str]:
    """Say which values some replicas do not hold at all, such as the scaler's, where all are files of one format."""
    if len({snapshot.format for snapshot in snapshots.values()}) > 1 or in_memory(snapshots):
        return []
    tops = {rank: {name.partition(".")[0] for name in snapshot.values} for rank, snapshot in snapshots.items()}
    gone: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for top in sorted(set().union(*tops.values())):
        ranks = tuple(rank for rank, of in tops.items() if top not in of)
        if ranks and not is_random((top,)):
            gone[ranks].append(top)
    notes = [
        f"not on {ranks_text(ranks)}, and so not compared: {names_text([f'{name:.80}' for name in names], 5)}"
        for ranks, names in list(gone.items())[:_MOST_NOTES]
    ]
    more = sum(map(len, list(gone.values())[_MOST_NOTES:]))
    return notes + ([f"nor compared: {more} more values that not all ranks have"] if more else [])


def is_membership(name: str) -> bool:
    """Whether a value names the parameters of one of an optimizer's groups: only snapshots of memory have it."""
    parts = name.split(".")
    return parts[0] == "optimizer" and parts[-1] in ("params", "(positions)") and parts[-3:-2] == ["param_groups"]


def holds_counted(snapshot: Snapshot) -> bool:
    """Whether a checkpoint holds Python values that make a group out of sync when they differ."""
    return any(value is not None for value in counted(snapshot).values())


def counted(snapshot: Snapshot) -> dict[str, Any]:
    """Return the Python values of a checkpoint that make a group out of sync when they differ."""
    return {name: value for name, value in _values(snapshot).items() if _counts(name)}


def stores_progress(snapshot: Snapshot) -> bool:
    """Whether a checkpoint says at which step or epoch it was written."""
    return any(value is not None for name, value in _values(snapshot).items() if name in PROGRESS)


def _values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the values of a checkpoint, those of its metadata where it has no others of that name."""
    progress = {"step": snapshot.metadata.step, "epoch": snapshot.metadata.epoch} if snapshot.metadata else {}
    return {name: value for name, value in progress.items() if value is not None} | dict(snapshot.values)


def _counts(name: str) -> bool:
    parts = name.split(".")
    optimizer = parts[0] == "optimizer" and ("param_groups" in parts or parts[-1] == "step")
    return name in PROGRESS or optimizer or parts[0] in SCALERS


def _counts_in_memory(name: str, wanted: Callable[[str, str], bool], kept: Callable[[str, str], bool]) -> bool:
    parts = name.split(".")
    if parts[-1] in _OWN or is_random(parts):
        return False
    # What counts in files counts whatever tensors are asked for.
    return kept(name, "value") if _counts(name) else wanted(name, "value")
