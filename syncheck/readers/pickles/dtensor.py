"""Tensor subclasses in a checkpoint's pickle. A DTensor or ShardedTensor is a rank's shard with its sharding.

torch writes a subclass as `_rebuild_from_type_v2(call, class, arguments, state)`. The state of a DTensor contains the
local tensor and a DTensorSpec: the mesh, and a placement for each mesh dimension. The state of a ShardedTensor (FSDP1)
contains the local shards, the offset, size and rank of every shard, and this rank's position in its process group.
Formats: torch/distributed/tensor/_dtensor_spec.py, torch/distributed/device_mesh.py and
torch/distributed/_shard/sharded_tensor/api.py of torch 2.6 to 2.15. Until torch 2.8 a mesh has a tensor of its ranks;
later a layout, which is sizes and strides into the list of all ranks.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

from syncheck.messages import Refusal
from syncheck.readers.pickles.stand_ins import (
    Compound,
    DTypeName,
    Inert,
    StandIn,
    TensorLocation,
    attributes_of,
    check_sizes,
    refused_tensor,
    tensor_in_parts,
)
from syncheck.snapshots import Sharding, are_naturals, contiguous_strides
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Mapping

# Limit of ranks in a mesh. The largest published runs have up to a hundred thousand.
_MAX_RANKS = 1 << 17
# Limit of process groups in a file. FSDP1 has a single group, or one for each wrapped module.
_MAX_GROUPS = 64
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"

# Sizes, ranks, coordinate, names, and this rank's coordinates in the other dimensions of the root mesh.
Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...], tuple[tuple[str, int], ...]]


class _Unknown(Exception):
    """The pickle describes a DTensor in an unknown way, so its tensor is counted but not compared."""


def _rebuild_from_type(call: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """Rebuild a tensor subclass: the local tensor of a DTensor, or the single tensor within another subclass."""
    attributes = attributes_of(state)
    if isinstance(kind, type) and getattr(kind, "name", "").endswith(".DTensor"):
        own = {name: attributes.pop(name) for name in ("_local_tensor", "_spec") if name in attributes}
        try:
            tensor = _read_local_tensor(args, own)
        except _Unknown:
            tensor = refused_tensor(Refusal.SHARDED_DTENSOR())
        return Compound.wrap(tensor, attributes, *own.values())
    if isinstance(kind, type) and getattr(kind, "name", "") == SHARDED_TENSOR:
        try:
            tensor = _read_chunk(kind, args, state)
        except _Unknown:
            tensor = refused_tensor(Refusal.SHARDED_TENSOR())
        return Compound.wrap(tensor, None, state)
    if isinstance(call, StandIn) and isinstance(args, tuple):
        return _add_state(call(*args), state)
    reason = Refusal.SUBCLASS(name=brief(getattr(kind, "name", kind), 80))
    return tensor_in_parts(reason, {"class": kind, "given": args, "state": state})


def _add_state(tensor: Any, state: Any) -> Any:
    """Return a rebuilt tensor with the state of its subclass, which contains all data of a wrapper."""
    if not state or not isinstance(tensor, TensorLocation):
        return tensor
    compound = Compound.wrap(tensor, state)
    return compound.in_parts() if tensor.refused == Refusal.WRAPPER() else compound


def _read_local_tensor(args: Any, parts: Mapping[str, Any]) -> TensorLocation:
    """Return the local tensor with its sharding. args: class, dtype, full shape, ..."""
    local, spec = parts.get("_local_tensor"), parts.get("_spec")
    if not isinstance(local, TensorLocation) or local.refused or not isinstance(args, tuple) or len(args) < 3:
        raise _Unknown
    mesh, placed = _get_field(spec, "mesh"), _get_field(spec, "placements")
    if not isinstance(mesh, Inert) or not isinstance(placed, (tuple, list)):
        raise _Unknown
    if mesh.known is None:  # all tensors of a file share their mesh
        mesh.known = _read_mesh(mesh)
    sizes, ranks, coordinate, names, beside = mesh.known
    placements = _apply_order(tuple(map(_format_placement, placed)), sizes, _get_field(spec, "shard_order"))
    if len(placements) != len(sizes):
        raise _Unknown
    return local.as_shard(Sharding(sizes, ranks, placements, _check_numbers(args[2]), names, coordinate, beside))


def _format_placement(placement: Any) -> str:
    """Return a placement as torch prints it; subclasses of Partial, like masked partials, print as partial."""
    name = getattr(type(placement), "name", "").rpartition(".")[2]
    if name == "Replicate":
        return "R"
    if name.endswith("Partial"):
        operation = _get_field(placement, "reduce_op")
        return f"P({operation})" if isinstance(operation, str) else "P"
    dim = _get_field(placement, "dim")
    if type(dim) is not int or name not in ("Shard", "_StridedShard"):
        raise _Unknown
    return f"S({dim})" if name == "Shard" else f"_S({dim}, {brief(_get_field(placement, 'split_factor'))})"


def _apply_order(placements: tuple[str, ...], sizes: tuple[int, ...], order: Any) -> tuple[str, ...]:
    """Write an explicit order of splits, which torch 2.10 and newer store, as strided shards.

    The split factor is the number of ranks of mesh dimensions to the right that are split earlier. order: pairs of a
    tensor dimension and its mesh dimensions in order; None for strided shards, and in older files.
    """
    changed = list(placements)
    for entry in order if isinstance(order, tuple) else ():
        given = entry.given if isinstance(entry, Inert) else ()
        if len(given) != 2 or type(given[0]) is not int:
            raise _Unknown
        mesh_dims = _check_numbers(given[1])
        for i, mesh_dim in enumerate(mesh_dims):
            factor = math.prod(sizes[earlier] for earlier in mesh_dims[:i] if mesh_dim < earlier < len(sizes))
            if mesh_dim >= len(changed) or changed[mesh_dim] != f"S({given[0]})":
                raise _Unknown
            if factor > 1:
                changed[mesh_dim] = f"_S({given[0]}, {factor})"
    return tuple(changed)


def _read_mesh(mesh: Inert) -> Mesh:
    """Return the layout of a DeviceMesh, and this rank's coordinates in its root mesh."""
    tensor = _get_field(mesh, "mesh")
    if isinstance(tensor, TensorLocation):
        sizes, ranks = tensor.shape, _check_numbers(_get_field(mesh, "_flatten_mesh_list"))
    else:
        sizes, ranks = _read_layout(mesh)
    coordinate = _read_coordinate(mesh, sizes)
    names = _read_names(mesh)
    if math.prod(sizes) != len(ranks) or len(set(ranks)) < len(ranks) or len(names) not in (0, len(sizes)):
        raise _Unknown
    beside: tuple[tuple[str, int], ...] = ()
    if isinstance(root := _get_field(mesh, "_root_mesh"), Inert):
        at = _check_numbers(_get_field(root, "_coordinate_on_dim"))
        beside = tuple(one for one in zip(_read_names(root), at, strict=False) if one[0] not in names)
    return tuple(sizes), ranks, coordinate, names, beside


def _read_names(mesh: Inert) -> tuple[str, ...]:
    names = _get_field(mesh, "mesh_dim_names", "_mesh_dim_names") or ()
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise _Unknown
    return tuple(names)


def _read_layout(mesh: Inert) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and ranks of a mesh with a layout of all ranks; a submesh contains only some of them."""
    all_ranks = _check_numbers(_get_field(mesh, "_flatten_rank_map"))
    axes = _list_axes(mesh)
    sizes = tuple(len(axis) for axis in axes)
    start, root = 0, _get_field(mesh, "_root_mesh")
    if isinstance(root, Inert):
        # The root mesh is divided into equal submeshes. This rank's submesh starts at the rank's position in the root
        # mesh minus its position in the submesh.
        start = _find_position(root, _list_axes(root)) - _find_position(mesh, axes)
    elif math.prod(sizes) != len(all_ranks):
        raise _Unknown
    at = [start + sum(steps) for steps in product(*axes)]
    if min(at) < 0 or max(at) >= len(all_ranks):
        raise _Unknown
    return sizes, tuple(all_ranks[position] for position in at)


def _find_position(mesh: Inert, axes: list[list[int]]) -> int:
    return sum(axis[i] for axis, i in zip(axes, _read_coordinate(mesh, tuple(map(len, axes))), strict=True))


def _list_axes(mesh: Inert) -> list[list[int]]:
    """List the steps of each mesh dimension through the list of ranks."""
    layout = _get_field(mesh, "_layout")
    flat = _get_field(layout, "axes")
    if flat is not None:
        pairs = [(_get_field(axis, "shape"), _get_field(axis, "stride")) for axis in _as_list(flat)]
    else:  # until torch 2.12, one layout for all dimensions, each of which can be nested
        shape, stride = (_as_list(_get_field(layout, name)) for name in ("shape", "stride"))
        if len(shape) != len(stride):
            raise _Unknown
        pairs = list(zip(shape, stride, strict=True))
    dims = [(_check_numbers(_as_list(shape)), _check_numbers(_as_list(stride))) for shape, stride in pairs]
    if any(len(shape) != len(stride) for shape, stride in dims):
        raise _Unknown
    if not 0 < math.prod(size for shape, _ in dims for size in shape) <= _MAX_RANKS:
        raise _Unknown
    within = [[[i * step for i in range(n)] for n, step in zip(*dim, strict=True)] for dim in dims]
    return [[sum(steps) for steps in product(*steps_of_dim)] for steps_of_dim in within]


def _read_coordinate(mesh: Inert, sizes: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = _check_numbers(_get_field(mesh, "_coordinate_on_dim"))
    if len(coordinate) != len(sizes) or any(at >= size for at, size in zip(coordinate, sizes, strict=True)):
        raise _Unknown
    return coordinate


def _read_chunk(kind: Any, args: Any, state: Any) -> TensorLocation:
    """Return this rank's shard of a ShardedTensor, with the sharding of a DTensor on a mesh of one dimension.

    FSDP1 splits dimension 0 like `torch.chunk`, and ranks beyond the last chunk have no local shard
    (torch/distributed/fsdp/_shard_utils.py). Other layouts are unknown.
    args: class, dtype, full shape, ... state: local shards, metadata, process group, ...
    """
    if not isinstance(args, tuple) or len(args) < 3 or not isinstance(state, tuple) or len(state) < 3:
        raise _Unknown
    shape, (local, metadata, group) = check_sizes(args[2]), state[:3]
    listed = _get_field(metadata, "shards_metadata")
    fields = ("local_rank", "global_rank", "local_world_size")
    at, rank, world = _check_numbers([_get_field(group, field) for field in fields])
    if not shape or not shape[0] or at >= world or not isinstance(local, list) or not isinstance(listed, list):
        raise _Unknown
    rows = -(-shape[0] // world)
    count = -(-shape[0] // rows)
    start, size = at * rows, (min(max(shape[0] - at * rows, 0), rows), *shape[1:])
    if len(listed) != count or len(local) != (at < count):
        raise _Unknown
    ends = _check_numbers([_get_field(_get_field(one, "placement"), "_rank") for one in (listed[0], listed[-1])])
    ranks = _list_group(kind, world, ((0, ends[0]), (count - 1, ends[1]), (at, rank)))
    if local:
        tensor, own = (_get_field(local[0], field) for field in ("tensor", "metadata"))
        place = [_check_numbers(_get_field(own, f"shard_{field}")) for field in ("offsets", "sizes")]
        if place != [(start, *[0] * len(shape[1:])), size]:
            raise _Unknown
    else:
        dtype = args[1].dtype if isinstance(args[1], DTypeName) else None
        tensor = TensorLocation(None, dtype, 0, size, contiguous_strides(size), data=b"")
    if not isinstance(tensor, TensorLocation) or tensor.refused or tensor.sharding or tensor.shape != size:
        raise _Unknown
    return tensor.as_shard(Sharding((world,), ranks, ("S(0)",), shape, (), (at,)))


def _list_group(kind: Any, world: int, known: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """List the ranks of a process group, which have equal distances.

    kind: the class in this file, which keeps the lists of all groups. known: positions in the group and their ranks.
    """
    first, (at, last) = known[0][1], max(known)
    step = max((last - first) // max(at, 1), 1)
    if world > _MAX_RANKS or any(rank != first + at * step for at, rank in known):
        raise _Unknown
    kind.known = kind.known or {}
    if (first, step, world) not in kind.known:
        if len(kind.known) == _MAX_GROUPS:
            raise _Unknown
        kind.known[first, step, world] = tuple(range(first, first + world * step, step))
    ranks: tuple[int, ...] = kind.known[first, step, world]
    return ranks


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _check_numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_RANKS or not are_naturals(value):
        raise _Unknown
    return tuple(value)


def _get_field(pickled: Any, *names: str) -> Any:
    """Return the first of the named attributes that an inert object has, or None."""
    for given in pickled.given if isinstance(pickled, Inert) else ():
        attributes = attributes_of(given)
        for name in names:
            if name in attributes:
                return attributes[name]
    return None


SUBCLASSES: dict[str, Any] = {"torch._tensor._rebuild_from_type_v2": StandIn(_rebuild_from_type)}
