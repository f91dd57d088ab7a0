"""How a DTensor in memory is laid over its mesh, in the words in which files tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from syncheck.snapshots import Sharding

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    Mesh = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]

# All parameters of a model share a mesh or two; to list the ranks of one anew for each takes long.
_MESHES: MutableMapping[Any, Mesh] = WeakKeyDictionary()


def sharding_of(tensor: Any) -> Sharding:
    """Return how a DTensor is laid out. Whatever is no copy and no shard is taken for a part of a sum."""
    sizes, ranks, coordinate, names = _mesh(tensor.device_mesh)
    placements = tuple(map(_placement, tensor.placements))
    return Sharding(sizes, ranks, placements, tuple(tensor.shape), names, coordinate)


def _mesh(mesh: Any) -> Mesh:
    """Return sizes, ranks in C order, this rank's coordinate and the names of a mesh's dimensions."""
    found = _MESHES.get(mesh)
    if found is None:
        at = mesh.get_coordinate()  # None on a rank that is not in it
        ranks = mesh.mesh
        found = tuple(ranks.shape), tuple(ranks.flatten().tolist()), tuple(at or ()), tuple(mesh.mesh_dim_names or ())
        _MESHES[mesh] = found
    return found


def _placement(placement: Any) -> str:
    """Write a placement as `snapshots.Sharding` has it."""
    if placement.is_replicate():
        return "R"
    name = type(placement).__name__
    if name == "_StridedShard":
        return f"_S({placement.dim}, {placement.split_factor})"
    return f"S({placement.dim})" if placement.is_shard() else f"P({getattr(placement, 'reduce_op', 'sum')})"
