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
        progress = {"step": snapshot.metadata.step, "epoch": snapshot.metadata.epoch} if snapshot.metadata else {}
        for name, value in (progress | dict(snapshot.values)).items():
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


def _counts(name: str) -> bool:
    parts = name.split(".")
    optimizer = parts[0] == "optimizer" and ("param_groups" in parts or parts[-1] == "step")
    return name in PROGRESS or optimizer or parts[0] in ("scaler", "grad_scaler", "amp_scaler")
