"""Reshard a saved state: merge the shards of all saving ranks, and distribute tensors to the current ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from train.mesh import join_shards

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def is_dtensor(tensor: Any) -> bool:
    """Return whether a value is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(tensor, "to_local")


def distribute_like(saved: Tensor, target: Tensor) -> Tensor:
    """Give a saved tensor the layout of `target`.

    saved: this rank's DTensor, or the whole tensor. For a whole tensor and a DTensor `target`, this is a collective
    that scatters rank 0's tensor.
    """
    if not is_dtensor(target):
        return saved.to_local() if is_dtensor(saved) else saved  # type: ignore[attr-defined]
    if is_dtensor(saved):  # the mesh in the file has no process group: use the current mesh
        shards: Tensor = join_shards(saved.to_local().to(target.device), like=target)  # type: ignore[attr-defined]
        return shards
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(saved.to(target.device), target.device_mesh, target.placements)  # type: ignore[attr-defined]


def merge_states(states: Mapping[int, dict[str, Any]], rank: int) -> dict[str, Any]:
    """Merge the states of all saving ranks into one state with whole tensors.

    states: by saving rank. rank: the source of values that every rank holds, such as buffers. Merged are, under fsdp
    and hsdp, the tensors of the model and the optimizer, and under zero the optimizer state of the parameters of each
    rank. `find_newest_state` refuses methods that shard by other rules.
    """
    state = dict(states[rank])
    # Under hsdp the first copy of the model has all shards.
    parts = [states[r] for r in sorted(states) if states[r]["syncheck"]["mesh"].get("replicate", 0) == 0]
    state["model"] = {
        name: _concatenate_shards([p["model"][name] for p in parts], own) for name, own in state["model"].items()
    }
    names: list[str] = []
    optimizer: dict[int, dict[str, Any]] = {}
    for part in parts:
        for index, name in enumerate(part["optimizer_names"]):
            if name in names:
                continue
            if index in part["optimizer"]["state"]:
                optimizer[len(names)] = {
                    key: _concatenate_shards([p["optimizer"]["state"][index][key] for p in parts], own)
                    if is_dtensor(own)
                    else own
                    for key, own in part["optimizer"]["state"][index].items()
                }
            names.append(name)
    state["optimizer_names"] = names
    state["optimizer"] = {"state": optimizer, "param_groups": state["optimizer"]["param_groups"]}
    return state


def _concatenate_shards(parts: list[Any], own: Any) -> Any:
    """Concatenate the local shards in rank order; return `own` if it is not a DTensor.

    FSDP2 shards along the first dimension like torch.chunk, so the last ranks may have no rows.
    """
    if not is_dtensor(own):
        return own
    return torch.cat([part.to_local() for part in parts])
