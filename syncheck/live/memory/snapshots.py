"""Things in memory as a snapshot: with the names, kinds and values that a checkpoint file of them would have."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.comparison.values import is_membership
from syncheck.dtypes import DTYPES
from syncheck.errors import UsageError
from syncheck.live.memory.tensor_bytes import MemoryTensor
from syncheck.live.memory.tree import Tree
from syncheck.live.memory.type_checks import class_title, is_readable
from syncheck.messages import Note, Refusal
from syncheck.names import normalize
from syncheck.readers.bookkeeping import settled
from syncheck.readers.pickles.tree import flatten
from syncheck.snapshots import Metadata, Snapshot, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.readers.pickles.stand_ins import TensorPlace

FORMAT = "memory"


def snapshot(*parts: Any, path: str = "", persistent: bool = False) -> Snapshot:
    """Return one replica in memory as a snapshot; its tensors are read when they are compared, and never changed.

    parts: modules, optimizers, whatever has a `state_dict()`, state dicts, nested checkpoints, tensors and arrays that
    together are the replica. path: what reports call it; by default the names of the classes. persistent: leave out
    the buffers that no state dict holds, to compare a module with a file. An optimizer's states are named by the
    parameters of the modules given, and by position where there are none.
    Raises UsageError for a part that holds no tensors by its class.
    """
    for part in parts:
        if not is_readable(part):
            raise UsageError(
                f"an object of class {type(part).__name__} cannot be compared; needs a module, an optimizer, a state "
                "dict, a tensor, or an object with a state_dict()"
            )
    path = path or ", ".join(class_title(part) for part in parts)
    tree = Tree(parts, persistent=persistent)
    flat = flatten(tree.root, path)
    for name, kind in tree.hidden:
        place = MemoryTensor(None, (), None, Refusal.IN_UNREAD_OBJECT(name=kind))
        flat.tensors[flat.free(name, flat.tensors)] = place
    tensors = {name: _make_tensor(name, place, path, name in tree.parameters) for name, place in flat.tensors.items()}
    metadata = _make_metadata(tree, tensors, flat.metadata) if tree.modules else flat.metadata
    # With a partitioned optimizer, the groups of each rank are of its own parameters.
    values = {name: value for name, value in flat.values.items() if not (tree.partitioned and is_membership(name))}
    stubs, unread = tuple(sorted(tree.stubs)), ", ".join(sorted(tree.unread))
    notes = (Note.NOT_READ_IN_FULL(objects=unread),) if unread else ()
    return settled(Snapshot(path, FORMAT, _sum_bytes(tensors.values()), tensors, values, stubs, metadata, notes))


def agree_on_buffers(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Let every snapshot that names its buffers name those of all: a buffer may be on some replicas only."""
    listed = list(snapshots)
    named = [s.metadata.buffers for s in listed if s.metadata is not None and s.metadata.buffers is not None]
    union = tuple(dict.fromkeys(name for buffers in named for name in buffers))
    return [
        replace(s, metadata=replace(s.metadata, buffers=union))
        if s.metadata is not None and s.metadata.buffers is not None
        else s
        for s in listed
    ]


def _make_tensor(name: str, place: TensorPlace, path: str, parameter: bool) -> Tensor:
    dtype = place.dtype.name if place.dtype else "unknown"
    held = place.held if isinstance(place, MemoryTensor) else None
    return Tensor(
        name,
        dtype,
        place.shape,
        place.strides,
        path,
        0,
        refused=place.refused,
        data=held,
        parameter=parameter,
        sharding=place.sharding,
    )


def _sum_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all tensors whose dtype is known."""
    return sum(tensor.numel * DTYPES[tensor.dtype].size for tensor in tensors if tensor.dtype in DTYPES)


def _make_metadata(tree: Tree, tensors: Mapping[str, Tensor], block: Metadata | None) -> Metadata:
    """Say what the modules know and a state dict does not. Names are those that the comparison sees, unwrap_optimizer."""
    # BatchNorm's modules are named by their statistics, for only whole names of tensors are unwrap_optimizer.
    short = normalize(tensors)
    momentum = {}
    for name, value in tree.bn_momentum.items():
        statistic = short.get(f"{name}.running_mean" if name else "running_mean")
        if statistic is not None:
            momentum[statistic.removesuffix("running_mean").removesuffix(".")] = value
    known = block or Metadata()
    return replace(
        known,
        buffers=tuple(short[name] for name in tree.buffers if name in short),
        frozen=tuple(short[name] for name in tree.frozen if name in short),
        bn_momentum=momentum,
        optimizer_sharded=known.optimizer_sharded or tree.partitioned,
        # So that a rank that has lost all states of its part is seen: nobody else has them.
        optimizer_parameters=known.optimizer_parameters
        or tuple(short[name] for name in tree.local_parameters if name in short),
        buffers_synced=known.buffers_synced if tree.buffers_synced is None else tree.buffers_synced,
    )
