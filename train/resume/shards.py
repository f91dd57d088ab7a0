"""Tensors that are divided over ranks: put together from the files of all ranks, and cut for those there are now."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def is_part(tensor: Any) -> bool:
    """Tell whether a tensor is a DTensor; without importing what only fsdp and hsdp need."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placed(saved: Tensor, target: Tensor) -> Tensor:
    """Lay a tensor from a file as `target` lies.

    saved: a part as this rank has saved it, or the whole tensor. For a whole one and a divided target this is a
    collective: rank 0's is scattered.
    """
    if not is_part(target):
        return saved
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
    if not is_part(saved):
        return distribute_tensor(saved.to(target.device), mesh, placements)
    # The mesh in the file knows no process group: the part is given the mesh of now.
    local = saved.to_local().to(target.device)  # type: ignore[attr-defined]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=target.shape, stride=target.stride())


def joined(states: Mapping[int, dict[str, Any]], rank: int) -> dict[str, Any]:
    """Make one state of those of all old ranks, with whole tensors; `rank`'s where each has its own, as for buffers.

    states: by the old rank. What is divided: under fsdp and hsdp tensors of the model and the optimizer, under zero the
    parameters that the optimizers know.
    """
    state = dict(states[rank])
    # Copies of the model, under hsdp: the first has all parts.
    parts = [states[r] for r in sorted(states) if states[r]["syncheck"]["mesh"].get("replicate", 0) == 0]
    state["model"] = {name: _whole([p["model"][name] for p in parts], own) for name, own in state["model"].items()}
    names: list[str] = []
    optimizer: dict[int, dict[str, Any]] = {}
    for part in parts:
        for index, name in enumerate(part["optimizer_names"]):
            if name in names:
                continue
            if index in part["optimizer"]["state"]:
                optimizer[len(names)] = {
                    key: _whole([p["optimizer"]["state"][index][key] for p in parts], own) if is_part(own) else own
                    for key, own in part["optimizer"]["state"][index].items()
                }
            names.append(name)
    state["optimizer_names"] = names
    state["optimizer"] = {"state": optimizer, "param_groups": state["optimizer"]["param_groups"]}
    return state


def _whole(parts: list[Any], own: Any) -> Any:
    """Put the rows of all parts together, in the order of the ranks; what is no part is `own`.

    FSDP2 cuts along the first dimension as torch.chunk does, so the last ranks may hold no rows.
    """
    if not is_part(own):
        return own
    return torch.cat([part.to_local() for part in parts])
