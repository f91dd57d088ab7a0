"""The metadata of a group: one block for the files of all ranks, and the settings of the optimizer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.layout.replica_groups import DIFFERENT_PARAMETERS, coordinates_in
from syncheck.snapshots import Metadata

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import NoSync, Snapshot

_SETTINGS = ("lr", "weight_decay", "momentum", "decoupled_weight_decay")


def get_metadata(snapshot: Snapshot) -> Metadata:
    """Return the metadata of a checkpoint; without metadata, the metadata of a model without a description."""
    return snapshot.metadata or Metadata()


def merge_metadata(snapshots: Mapping[int, Snapshot]) -> Metadata:
    """Return the metadata of the first rank with any; for stages and experts, with the names of all ranks."""
    blocks = [snapshot.metadata for snapshot in snapshots.values() if snapshot.metadata is not None]
    if not blocks:
        return Metadata()

    # "active" on any rank is the strongest evidence.
    no_sync: NoSync = min((block.no_sync for block in blocks if block.no_sync), default="")
    first = replace(blocks[0], no_sync=no_sync)
    positions = {coordinates_in(snapshot, DIFFERENT_PARAMETERS) for snapshot in snapshots.values()}
    if len(positions) < 2:
        return first

    # Dictionaries without values are sets that keep the order.
    optimizer_parameters: dict[str, None] = {}
    frozen: dict[str, None] = {}
    for block in blocks:
        optimizer_parameters |= dict.fromkeys(block.optimizer_parameters)
        frozen |= dict.fromkeys(block.frozen)

    return replace(
        first,
        optimizer_parameters=tuple(optimizer_parameters),
        buffers=_join_buffers(blocks),
        frozen=tuple(frozen),
    )


def _join_buffers(blocks: Sequence[Metadata]) -> tuple[str, ...] | None:
    """Return the buffers of all ranks; None if the model of a rank was not described."""
    buffers: dict[str, None] = {}
    for block in blocks:
        if block.buffers is None:
            return None

        buffers |= dict.fromkeys(block.buffers)

    return tuple(buffers)


def hyperparameters(values: Mapping[str, Any]) -> dict[str, float]:
    """Return lr, weight decay and momentum of the first parameter group from the values of a snapshot.

    decoupled_weight_decay: 1.0 if the decay is not part of the gradients, as with AdamW.
    """
    numbers: dict[str, float] = {}
    for setting in _SETTINGS:
        value = values.get(f"optimizer.param_groups.0.{setting}")
        if isinstance(value, (int, float)):
            numbers[setting] = float(value)

    return numbers
