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
from typing import Any, NamedTuple

from syncheck.messages import Refusal
from syncheck.readers import untrusted
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

# Limit of ranks in a mesh. The largest published runs have up to a hundred thousand.
_MAX_RANKS = 1 << 17
# Limit of process groups in a file. FSDP1 has a single group, or one for each wrapped module.
_MAX_GROUPS = 64
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"


class _Mesh(NamedTuple):
    """A DeviceMesh, and the position of this rank in it."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    """In C order."""
    coordinate: tuple[int, ...]
    names: tuple[str, ...]
    """Empty for unnamed dimensions."""
    root_coordinate: tuple[tuple[str, int], ...]
    """Names and coordinates of the dimensions of the root mesh that are not part of this mesh."""


class _Dim(NamedTuple):
    """A mesh dimension as a nested layout: sizes, and strides through the list of ranks."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _Position(NamedTuple):
    """The position of a rank in a process group, and the number of ranks in the group."""

    group_rank: int
    rank: int
    group_size: int


class _Box(NamedTuple):
    """The position of a shard in its tensor, in elements."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


class _Unknown(Exception):
    """The pickle describes a DTensor in an unknown way, so its tensor is counted but not compared."""


def _require(condition: bool) -> None:
    """Raise _Unknown unless a condition holds."""
    if not condition:
        raise _Unknown


def _rebuild_from_type(call: Any, kind: Any, args: Any, state: Any = None) -> Any:
    """Rebuild a tensor subclass: the local tensor of a DTensor, or the single tensor within another subclass."""
    class_name = getattr(kind, "name", "") if isinstance(kind, type) else ""
    if class_name.endswith(".DTensor"):
        return _rebuild_dtensor(args, attributes_of(state))
    if class_name == SHARDED_TENSOR:
        return _rebuild_sharded_tensor(kind, args, state)
    if isinstance(call, StandIn) and isinstance(args, tuple):
        return _add_state(call(*args), state)

    reason = Refusal.SUBCLASS(name=brief(getattr(kind, "name", kind), 80))
    return tensor_in_parts(reason, {"class": kind, "given": args, "state": state})


def _rebuild_dtensor(args: Any, attributes: dict[Any, Any]) -> Compound:
    """Return the local tensor of a DTensor with the further attributes of the DTensor."""
    replaced = {}
    for name in ("_local_tensor", "_spec"):
        if name in attributes:
            replaced[name] = attributes.pop(name)

    try:
        tensor = _read_local_tensor(args, replaced.get("_local_tensor"), replaced.get("_spec"))
    except _Unknown:
        tensor = refused_tensor(Refusal.SHARDED_DTENSOR())
    return Compound.wrap(tensor, attributes, *replaced.values())


def _rebuild_sharded_tensor(kind: Any, args: Any, state: Any) -> Compound:
    """Return the local shard of a ShardedTensor."""
    try:
        tensor = _read_local_shard(kind, args, state)
    except _Unknown:
        tensor = refused_tensor(Refusal.SHARDED_TENSOR())
    return Compound.wrap(tensor, None, state)


def _add_state(tensor: Any, state: Any) -> Any:
    """Return a rebuilt tensor with the state of its subclass, which contains all data of a wrapper."""
    if not state or not isinstance(tensor, TensorLocation):
        return tensor
    compound = Compound.wrap(tensor, state)
    return compound.in_parts() if tensor.refused == Refusal.WRAPPER() else compound


def _read_local_tensor(args: Any, local: Any, spec: Any) -> TensorLocation:
    """Return the local tensor with its sharding.

    args: class, dtype, full shape, ...
    local: the local tensor.
    spec: the DTensorSpec.
    """
    _require(isinstance(local, TensorLocation) and not local.refused)
    _require(isinstance(args, tuple) and len(args) >= 3)
    pickled_mesh = _get_field(spec, "mesh")
    pickled_placements = _get_field(spec, "placements")
    _require(isinstance(pickled_mesh, Inert))
    _require(isinstance(pickled_placements, (tuple, list)))
    # All tensors of a file share their mesh.
    if pickled_mesh.interpretation is None:
        pickled_mesh.interpretation = _read_mesh(pickled_mesh)
    mesh: _Mesh = pickled_mesh.interpretation
    placements = tuple(_format_placement(placement) for placement in pickled_placements)
    placements = _apply_order(placements, mesh.sizes, _get_field(spec, "shard_order"))
    _require(len(placements) == len(mesh.sizes))
    full_shape = _check_numbers(args[2])
    sharding = Sharding(
        mesh=mesh.sizes,
        ranks=mesh.ranks,
        placements=placements,
        shape=full_shape,
        names=mesh.names,
        coordinate=mesh.coordinate,
        beside=mesh.root_coordinate,
    )
    tensor: TensorLocation = local.as_shard(sharding)
    return tensor


def _format_placement(placement: Any) -> str:
    """Return a placement as torch prints it; subclasses of Partial, like masked partials, print as partial."""
    name = getattr(type(placement), "name", "").rpartition(".")[2]
    if name == "Replicate":
        return "R"
    if name.endswith("Partial"):
        operation = _get_field(placement, "reduce_op")
        return f"P({operation})" if isinstance(operation, str) else "P"

    dim = _get_field(placement, "dim")
    _require(type(dim) is int)
    _require(name in ("Shard", "_StridedShard"))
    if name == "Shard":
        return f"S({dim})"

    split_factor = brief(_get_field(placement, "split_factor"))
    return f"_S({dim}, {split_factor})"


def _apply_order(placements: tuple[str, ...], sizes: tuple[int, ...], order: Any) -> tuple[str, ...]:
    """Write an explicit order of splits, which torch 2.10 and newer store, as strided shards.

    order: pairs of a tensor dimension and its mesh dimensions in order; None for strided shards, and in older files.
    """
    if not isinstance(order, tuple):
        return placements

    strided = list(placements)
    for pickled_pair in order:
        _require(isinstance(pickled_pair, Inert))
        _require(len(pickled_pair.arguments) == 2)
        tensor_dim, pickled_dims = pickled_pair.arguments
        _require(type(tensor_dim) is int)
        mesh_dims = _check_numbers(pickled_dims)
        for i, mesh_dim in enumerate(mesh_dims):
            _require(mesh_dim < len(strided))
            _require(strided[mesh_dim] == f"S({tensor_dim})")
            split_factor = _compute_split_factor(mesh_dim, mesh_dims[:i], sizes)
            if split_factor > 1:
                strided[mesh_dim] = f"_S({tensor_dim}, {split_factor})"
    return tuple(strided)


def _compute_split_factor(mesh_dim: int, earlier_dims: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return the number of ranks of the mesh dimensions to the right of a dimension that are split before it."""
    split_factor = 1
    for earlier_dim in earlier_dims:
        if mesh_dim < earlier_dim < len(sizes):
            split_factor *= sizes[earlier_dim]
    return split_factor


def _read_mesh(mesh: Inert) -> _Mesh:
    """Return the layout of a DeviceMesh, and this rank's coordinates in its root mesh."""
    tensor = _get_field(mesh, "mesh")
    if isinstance(tensor, TensorLocation):
        sizes = tensor.shape
        ranks = _check_numbers(_get_field(mesh, "_flatten_mesh_list"))
    else:
        sizes, ranks = _read_layout(mesh)
    coordinate = _read_coordinate(mesh, sizes)
    names = _read_names(mesh)
    _require(math.prod(sizes) == len(ranks))
    _require(len(set(ranks)) == len(ranks))
    _require(len(names) in (0, len(sizes)))
    return _Mesh(tuple(sizes), ranks, coordinate, names, _read_root_coordinate(mesh, names))


def _read_root_coordinate(mesh: Inert, names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return this rank's coordinates in the dimensions of the root mesh that are not dimensions of the mesh.

    names: of the dimensions of the mesh.
    """
    root = _get_field(mesh, "_root_mesh")
    if not isinstance(root, Inert):
        return ()

    coordinate = _check_numbers(_get_field(root, "_coordinate_on_dim"))
    named_coordinate = zip(_read_names(root), coordinate, strict=False)
    return tuple((name, index) for name, index in named_coordinate if name not in names)


def _read_names(mesh: Inert) -> tuple[str, ...]:
    names = _get_field(mesh, "mesh_dim_names", "_mesh_dim_names") or ()
    _require(untrusted.are_strings(names))
    return tuple(names)


def _read_layout(mesh: Inert) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and ranks of a mesh with a layout of all ranks; a submesh contains only some of them."""
    all_ranks = _check_numbers(_get_field(mesh, "_flatten_rank_map"))
    axes = _list_axes(mesh)
    sizes = tuple(len(axis) for axis in axes)
    start = 0
    root = _get_field(mesh, "_root_mesh")
    if isinstance(root, Inert):
        # The root mesh is divided into equal submeshes. This rank's submesh starts at the rank's position in the root
        # mesh minus its position in the submesh.
        start = _find_position(root, _list_axes(root)) - _find_position(mesh, axes)
    else:
        _require(math.prod(sizes) == len(all_ranks))
    positions = [start + sum(steps) for steps in product(*axes)]
    _require(min(positions) >= 0)
    _require(max(positions) < len(all_ranks))
    return sizes, tuple(all_ranks[position] for position in positions)


def _find_position(mesh: Inert, axes: list[list[int]]) -> int:
    """Return the position of this rank in the list of ranks, relative to the start of the mesh."""
    sizes = tuple(len(axis) for axis in axes)
    coordinate = _read_coordinate(mesh, sizes)
    return sum(axis[index] for axis, index in zip(axes, coordinate, strict=True))


def _list_axes(mesh: Inert) -> list[list[int]]:
    """List the steps of each mesh dimension through the list of ranks."""
    dims = _read_dims(_get_field(mesh, "_layout"))
    for dim in dims:
        _require(len(dim.sizes) == len(dim.strides))
    # A file of a few bytes could otherwise claim any number of steps.
    size = math.prod(math.prod(dim.sizes) for dim in dims)
    _require(0 < size <= _MAX_RANKS)
    return [_list_steps(dim) for dim in dims]


def _read_dims(layout: Any) -> list[_Dim]:
    """Return the dimensions of a mesh layout, whose sizes and strides are not compared yet."""
    axes = _get_field(layout, "axes")
    if axes is not None:
        return [_make_dim(_get_field(axis, "shape"), _get_field(axis, "stride")) for axis in _as_list(axes)]

    # Until torch 2.12, one layout had the shapes and strides of all dimensions.
    shapes = _as_list(_get_field(layout, "shape"))
    strides = _as_list(_get_field(layout, "stride"))
    _require(len(shapes) == len(strides))
    return [_make_dim(shape, stride) for shape, stride in zip(shapes, strides, strict=True)]


def _make_dim(shape: Any, stride: Any) -> _Dim:
    """Return a dimension. shape, stride: a number each, or several numbers if the layout is nested."""
    return _Dim(_check_numbers(_as_list(shape)), _check_numbers(_as_list(stride)))


def _list_steps(dim: _Dim) -> list[int]:
    """List the steps from the start of a dimension to each of its indices, in C order of a nested layout."""
    steps = [0]
    for size, stride in zip(dim.sizes, dim.strides, strict=True):
        longer_steps: list[int] = []
        for step in steps:
            longer_steps += [step + i * stride for i in range(size)]
        steps = longer_steps
    return steps


def _read_coordinate(mesh: Inert, sizes: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = _check_numbers(_get_field(mesh, "_coordinate_on_dim"))
    _require(len(coordinate) == len(sizes))
    _require(all(index < size for index, size in zip(coordinate, sizes, strict=True)))
    return coordinate


def _read_local_shard(kind: Any, args: Any, state: Any) -> TensorLocation:
    """Return this rank's shard of a ShardedTensor, with the sharding of a DTensor on a mesh of one dimension.

    FSDP1 splits dimension 0 like `torch.chunk`, and ranks beyond the last chunk have no local shard
    (torch/distributed/fsdp/_shard_utils.py). Other layouts are unknown.
    kind: the class in this file.
    args: class, dtype, full shape, ...
    state: local shards, metadata, process group, ...
    """
    _require(isinstance(args, tuple) and len(args) >= 3)
    _require(isinstance(state, tuple) and len(state) >= 3)
    shape = check_sizes(args[2])
    local_shards, metadata, process_group = state[:3]
    all_shards = _get_field(metadata, "shards_metadata")
    position = _read_position(process_group)
    _require(len(shape) > 0 and shape[0] > 0)
    _require(position.group_rank < position.group_size)
    _require(isinstance(local_shards, list))
    _require(isinstance(all_shards, list))

    rows_per_shard = _divide_up(shape[0], position.group_size)
    shard_count = _divide_up(shape[0], rows_per_shard)
    has_shard = position.group_rank < shard_count
    _require(len(all_shards) == shard_count)
    _require(len(local_shards) == has_shard)

    first_rank, last_rank = _check_numbers([_read_rank(all_shards[0]), _read_rank(all_shards[-1])])
    known_positions = ((0, first_rank), (shard_count - 1, last_rank), (position.group_rank, position.rank))
    ranks = _list_group(kind, position.group_size, known_positions)

    start = position.group_rank * rows_per_shard
    rows = min(max(shape[0] - start, 0), rows_per_shard)
    box = _Box((start, *[0] * len(shape[1:])), (rows, *shape[1:]))
    tensor = _make_empty_tensor(args[1], box.shape)
    if has_shard:
        tensor = _read_shard_tensor(local_shards[0], box)
    sharding = Sharding(
        mesh=(position.group_size,),
        ranks=ranks,
        placements=("S(0)",),
        shape=shape,
        coordinate=(position.group_rank,),
    )
    return tensor.as_shard(sharding)


def _read_position(process_group: Any) -> _Position:
    """Return this rank's position in a process group."""
    fields = ("local_rank", "global_rank", "local_world_size")
    return _Position(*_check_numbers([_get_field(process_group, field) for field in fields]))


def _read_rank(shard_metadata: Any) -> Any:
    """Return the rank that a shard belongs to, which is not checked yet."""
    return _get_field(_get_field(shard_metadata, "placement"), "_rank")


def _read_shard_tensor(shard: Any, box: _Box) -> TensorLocation:
    """Return the tensor of a local shard, if it is the expected box of the full tensor."""
    tensor = _get_field(shard, "tensor")
    metadata = _get_field(shard, "metadata")
    start = _check_numbers(_get_field(metadata, "shard_offsets"))
    shape = _check_numbers(_get_field(metadata, "shard_sizes"))
    _require(box == (start, shape))
    _require(isinstance(tensor, TensorLocation))
    _require(not tensor.refused)
    _require(tensor.sharding is None)
    _require(tensor.shape == box.shape)
    location: TensorLocation = tensor
    return location


def _make_empty_tensor(dtype_name: Any, shape: tuple[int, ...]) -> TensorLocation:
    """Return the tensor of a rank that has no shard. shape: with 0 rows."""
    dtype = dtype_name.dtype if isinstance(dtype_name, DTypeName) else None
    return TensorLocation(None, dtype, 0, shape, contiguous_strides(shape), data=b"")


def _divide_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _list_group(kind: Any, group_size: int, known_positions: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    """List the ranks of a process group, which have equal distances.

    kind: the class in this file, which keeps the lists of all groups.
    known_positions: positions in the group and their ranks; the first is position 0.
    """
    first_rank = known_positions[0][1]
    last_index, last_rank = max(known_positions)
    distance = max((last_rank - first_rank) // max(last_index, 1), 1)
    _require(group_size <= _MAX_RANKS)
    _require(all(rank == first_rank + index * distance for index, rank in known_positions))
    if kind.interpretation is None:
        kind.interpretation = {}
    groups: dict[tuple[int, int, int], tuple[int, ...]] = kind.interpretation
    key = (first_rank, distance, group_size)
    if key not in groups:
        _require(len(groups) < _MAX_GROUPS)
        groups[key] = tuple(range(first_rank, first_rank + group_size * distance, distance))
    return groups[key]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _check_numbers(value: Any) -> tuple[int, ...]:
    _require(isinstance(value, (tuple, list)))
    _require(len(value) <= _MAX_RANKS)
    _require(are_naturals(value))
    return tuple(value)


def _get_field(pickled: Any, *names: str) -> Any:
    """Return the first of the named attributes that an inert object has, or None."""
    if not isinstance(pickled, Inert):
        return None

    for argument in pickled.arguments:
        attributes = attributes_of(argument)
        for name in names:
            if name in attributes:
                return attributes[name]
    return None


SUBCLASSES: dict[str, Any] = {"torch._tensor._rebuild_from_type_v2": StandIn(_rebuild_from_type)}
