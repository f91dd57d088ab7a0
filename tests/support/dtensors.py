"""DTensors for tests, pickled as by torch 2.6 and torch 2.15, without torch or a process group."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from support.checkpoints import Call, Global, save_pth

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PLACES = "torch.distributed.tensor.placement_types"


def new(module: str, name: str, state: Any = None) -> Call:
    """Return an object created without arguments and updated with its state."""
    return Call(Global(module, name), (), state)


def placement(text: str) -> Call:
    """Return the object of a placement as torch prints it: R, S(0), _S(0, 2) or P(sum)."""
    if text == "R":
        return new(_PLACES, "Replicate")
    name, _, inner = text.rstrip(")").partition("(")
    if name == "P":
        return new(_PLACES, "Partial", {"reduce_op": inner})
    dim, *factor = map(int, inner.split(","))
    state = {"dim": dim} | ({"split_factor": factor[0]} if factor else {})
    return new(_PLACES, "Shard" if name == "S" else "_StridedShard", state)


def mesh_of_2_6(ranks: Any, coordinate: Sequence[int], names: Any = None) -> Call:
    """Return a DeviceMesh with a tensor of its ranks."""
    array = np.asarray(ranks)
    state = {
        "device_type": "cpu",
        "mesh": array,
        "mesh_dim_names": names,
        "_flatten_mesh_list": tuple(array.ravel().tolist()),
        "_coordinate_on_dim": list(coordinate),
    }
    return new("torch.distributed.device_mesh", "DeviceMesh", state)


def mesh_of_2_15(
    shape: Sequence[Any], stride: Sequence[Any], world: int, coordinate: Sequence[int], root: Any = None
) -> Call:
    """Return a DeviceMesh with a layout: sizes and strides of each dimension into the list of all ranks."""
    axes = tuple(
        new("torch.distributed._mesh_layout", "_FlatLayout", {"shape": (n,), "stride": (step,)})
        for n, step in zip(shape, stride, strict=True)
    )
    state = {
        "_layout": new("torch.distributed._mesh_layout", "_MeshLayout", {"axes": axes}),
        "_flatten_rank_map": tuple(range(world)),
        "_mesh_dim_names": None,
        "_root_mesh": root,
        "_coordinate_on_dim": tuple(coordinate),
    }
    return new("torch.distributed.device_mesh", "DeviceMesh", state)


def dtensor(local: Any, placements: Sequence[str], mesh: Call, shape: Sequence[int] = (8, 3)) -> Call:
    """Return a DTensor with the local tensor of a rank. shape: of the full tensor."""
    kind = Global("torch.distributed.tensor", "DTensor")
    spec = {"mesh": mesh, "placements": tuple(map(placement, placements))}
    state = {"_local_tensor": local, "_spec": new("torch.distributed.tensor._dtensor_spec", "DTensorSpec", spec)}
    arguments = (kind, Global("torch", "float32"), tuple(shape), (3, 1), 0, None, None, False)
    rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (rebuild, kind, arguments, (None, state)))


def save_ranks(
    folder: Path, parts: dict[int, Any], placements: Sequence[str], mesh: Sequence[int], **more: dict[int, Any]
) -> list[Path]:
    """Write a file for each rank with a DTensor `w` of its local tensor. parts, more: by rank; more: other entries."""
    ranks = np.arange(math.prod(mesh)).reshape(mesh)
    files = []
    for rank, local in parts.items():
        coordinate = [int(i) for i in np.unravel_index(rank, tuple(mesh))]
        content = {"w": dtensor(local, placements, mesh_of_2_6(ranks, coordinate))}
        content |= {name: by_rank[rank] for name, by_rank in more.items() if rank in by_rank}
        files.append(save_pth(folder / f"m_rank{rank}.pth", content))
    return files
