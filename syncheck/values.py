"""Compare what a checkpoint holds beside tensors: step, epoch, learning rates, the scaler's state, notes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.records import PROGRESS, ValueDiff

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.records import Snapshot


def compare_values(snapshots: Mapping[int, Snapshot]) -> list[ValueDiff]:
    """List the Python values that are not equal on all replicas.

    One that some replicas lack does not count against them: the formats hold different ones.
    """
    by_name: dict[str, dict[int, Any]] = defaultdict(dict)
    for rank, snapshot in snapshots.items():
        for name, value in _values(snapshot).items():
            by_name[name][rank] = value
    diffs = []
    for name, values in by_name.items():
        listed = list(values.values())
        differ = any(value != listed[0] and not (value != value and listed[0] != listed[0]) for value in listed[1:])
        if differ or len(values) < len(snapshots):
            diffs.append(
                ValueDiff(name, {rank: values.get(rank) for rank in snapshots}, counts=differ and _counts(name))
            )
    return diffs


def holds_counted(snapshot: Snapshot) -> bool:
    """Whether a checkpoint holds Python values that make a group out of sync when they differ."""
    return any(value is not None and _counts(name) for name, value in _values(snapshot).items())


def stores_progress(snapshot: Snapshot) -> bool:
    """Whether a checkpoint says at which step or epoch it was written."""
    return any(value is not None for name, value in _values(snapshot).items() if name in PROGRESS)


def _values(snapshot: Snapshot) -> dict[str, Any]:
    """Return the values of a checkpoint, those of its metadata where it has no others of that name."""
    progress = {"step": snapshot.metadata.step, "epoch": snapshot.metadata.epoch} if snapshot.metadata else {}
    return progress | dict(snapshot.values)


def _counts(name: str) -> bool:
    parts = name.split(".")
    optimizer = parts[0] == "optimizer" and ("param_groups" in parts or parts[-1] == "step")
    return name in PROGRESS or optimizer or parts[0] in ("scaler", "grad_scaler", "amp_scaler")
