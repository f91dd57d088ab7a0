"""Snapshots of objects in memory, with the names, kinds and values of an equivalent checkpoint file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.memory.objects import class_title, is_readable
from syncheck.live.memory.tensor_bytes import MemoryTensor
from syncheck.live.memory.tree import Tree
from syncheck.messages import Note, Refusal
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.pickles.tree import flatten
from syncheck.snapshots import Metadata, Snapshot, Tensor
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import list_spellings, normalize
from syncheck.tensors.value_kinds import is_membership

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.readers.pickles.stand_ins import TensorLocation

FORMAT = "memory"
# Attributes in the note about objects that were not read.
_MOST_UNREAD = 8


def snapshot(*parts: Any, path: str = "", persistent: bool = False, attributes: bool = False) -> Snapshot:
    """Return a snapshot of one replica in memory. Its tensors are read during the comparison, and never changed.

    parts: modules, optimizers, other objects with a `state_dict()`, state dicts, nested checkpoints, tensors and arrays
    that form the replica. path: its name in reports, by default the class names. persistent: skip non-persistent
    buffers, to compare a module with a file. attributes: read the plain attributes of modules. Optimizer states are
    named by the parameters of the given modules, or by position without modules. Raises UsageError for a part whose
    class holds no tensors.
    """
    for part in parts:
        if not is_readable(part):
            raise UsageError(
                f"an object of class {type(part).__name__} cannot be compared; expected a module, an optimizer, a "
                "state dict, a tensor, or an object with a state_dict()"
            )
    path = path or ", ".join(class_title(part) for part in parts)
    tree = Tree(parts, persistent=persistent)
    flat = flatten(tree.root, path)
    for name, kind in tree.hidden:
        place = MemoryTensor(None, (), None, Refusal.IN_UNREAD_OBJECT(name=kind))
        flat.tensors[flat.unique_name(name, flat.tensors)] = place
    tensors = {name: _make_tensor(name, place, path, name in tree.parameters) for name, place in flat.tensors.items()}
    metadata = _make_metadata(tree, tensors, flat.metadata) if tree.modules else flat.metadata
    # With a partitioned optimizer, the groups of each rank contain its own parameters only.
    values = {name: value for name, value in flat.values.items() if not (tree.partitioned and is_membership(name))}
    plain = tree.attributes.finish() if attributes and tree.modules else None
    unread = sorted(tree.unread)
    if plain is not None:
        unread += plain.unread[:_MOST_UNREAD]
        unread += [f"{len(plain.unread) - _MOST_UNREAD} more attributes"] * (len(plain.unread) > _MOST_UNREAD)
    notes = (Note.NOT_READ_IN_FULL(objects=", ".join(unread)),) if unread else ()
    return remove_bookkeeping(
        Snapshot(
            path,
            FORMAT,
            _sum_bytes(tensors.values()),
            tensors,
            values,
            tuple(sorted(tree.stubs)),
            metadata,
            notes,
            attributes=None if plain is None else plain.values | tree.modes,
        )
    )


def agree_on_buffers(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Give every snapshot with buffer names the union of the names: a buffer may be on some replicas only."""
    listed = list(snapshots)
    buffer_lists = [s.metadata.buffers for s in listed if s.metadata is not None and s.metadata.buffers is not None]
    union = tuple(dict.fromkeys(name for buffers in buffer_lists for name in buffers))
    return [
        replace(s, metadata=replace(s.metadata, buffers=union))
        if s.metadata is not None and s.metadata.buffers is not None
        else s
        for s in listed
    ]


def _make_tensor(name: str, place: TensorLocation, path: str, parameter: bool) -> Tensor:
    dtype = place.dtype.name if place.dtype else "unknown"
    data = place.content if isinstance(place, MemoryTensor) else None
    return Tensor(
        name,
        dtype,
        place.shape,
        place.strides,
        path,
        0,
        refused=place.refused,
        data=data,
        parameter=parameter,
        sharding=place.sharding,
    )


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all tensors with a known dtype."""
    return sum(tensor.numel * DTYPES[tensor.dtype].size for tensor in tensors if tensor.dtype in DTYPES)


def _make_metadata(tree: Tree, tensors: Mapping[str, Tensor], block: Metadata | None) -> Metadata:
    """Return metadata that modules have and state dicts lack. Names are normalized, as in the comparison."""
    # BatchNorm modules are normalized by the names of their statistics, because `normalize` takes tensor names only.
    normalized = normalize(tensors)
    momentum = {}
    for name, value in tree.bn_momentum.items():
        statistic = normalized.get(f"{name}.running_mean" if name else "running_mean")
        if statistic is not None:
            momentum[statistic.removesuffix("running_mean").removesuffix(".")] = value
    metadata = block or Metadata()
    return replace(
        metadata,
        buffers=tuple(normalized[name] for name in tree.buffers if name in normalized),
        frozen=tuple(normalized[name] for name in tree.frozen if name in normalized),
        averaged=tuple(spelling for name in tree.averaged for spelling in list_spellings(name)),
        bn_momentum=momentum,
        optimizer_sharded=metadata.optimizer_sharded or tree.partitioned,
        # To detect a rank that has lost all states of its parameters, which no other rank has.
        optimizer_parameters=metadata.optimizer_parameters
        or tuple(normalized[name] for name in tree.local_parameters if name in normalized),
        no_sync=tree.no_sync,
        buffers_synced=metadata.buffers_synced if tree.buffers_synced is None else tree.buffers_synced,
    )
