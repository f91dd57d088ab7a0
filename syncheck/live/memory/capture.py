"""Snapshots of objects in memory, with the names, kinds and values of an equivalent checkpoint file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.memory.objects import add_dot, class_title, is_readable
from syncheck.live.memory.tensor_bytes import MemoryTensor, make_refused
from syncheck.live.memory.tree import Tree
from syncheck.messages import Note, Refusal
from syncheck.readers.bookkeeping import remove_bookkeeping
from syncheck.readers.pickles.tree import flatten
from syncheck.snapshots import Metadata, Snapshot, Tensor
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.names import list_spellings, normalize
from syncheck.tensors.value_kinds import is_membership

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.readers.pickles.stand_ins import TensorLocation

FORMAT = "memory"
# Attributes in the note about objects that were not read.
_MOST_UNREAD = 8


def snapshot(*parts: Any, path: str = "", persistent: bool = False, attributes: bool = False) -> Snapshot:
    """Return a snapshot of one replica in memory. Its tensors are read during the comparison, and never changed.

    parts: modules, optimizers, other objects with a `state_dict()`, state dicts, nested checkpoints, tensors and arrays
        that form the replica. Optimizer states are named by the parameters of the given modules, or by position without
        modules.
    path: its name in reports, by default the class names.
    persistent: skip non-persistent buffers, to compare a module with a file.
    attributes: read the plain attributes of modules.

    Raises UsageError for a part whose class holds no tensors.
    """
    for part in parts:
        if not is_readable(part):
            raise UsageError(
                f"an object of class {type(part).__name__} cannot be compared; expected a module, an optimizer, a "
                "state dict, a tensor, or an object with a state_dict()"
            )

    path = path or ", ".join([class_title(part) for part in parts])
    tree = Tree(parts, persistent=persistent)
    flat = flatten(tree.root, path)
    # Listed as tensors that are not compared, so that a report does not claim to be complete.
    for name, class_name in tree.hidden:
        unique_name = flat.unique_name(name, flat.tensors)
        flat.tensors[unique_name] = make_refused(Refusal.IN_UNREAD_OBJECT(name=class_name))

    tensors = {}
    for name, description in flat.tensors.items():
        tensors[name] = _make_tensor(name, description, path, name in tree.parameters)

    values = flat.values
    if tree.partitioned:
        # With a partitioned optimizer, the groups of each rank contain its own parameters only.
        values = {name: value for name, value in values.items() if not is_membership(name)}

    metadata = flat.metadata
    unread = sorted(tree.unread)
    attribute_values = None
    if tree.modules:
        metadata = _make_metadata(tree, tensors, flat.metadata)
        if attributes:
            plain_attributes = tree.attributes.finish()
            attribute_values = plain_attributes.values | tree.modes
            unread += _limit(plain_attributes.unread)

    return remove_bookkeeping(
        Snapshot(
            path=path,
            format=FORMAT,
            bytes=_sum_bytes(tensors.values()),
            tensors=tensors,
            values=values,
            stubs=tuple(sorted(tree.stubs)),
            metadata=metadata,
            notes=(Note.NOT_READ_IN_FULL(objects=", ".join(unread)),) if unread else (),
            attributes=attribute_values,
        )
    )


def _limit(unread: Sequence[str]) -> list[str]:
    """Return the first attributes that were not read, and the number of the rest."""
    texts = list(unread[:_MOST_UNREAD])
    if len(unread) > _MOST_UNREAD:
        texts.append(f"{len(unread) - _MOST_UNREAD} more attributes")

    return texts


def agree_on_buffers(snapshots: Iterable[Snapshot]) -> list[Snapshot]:
    """Give every snapshot with buffer names the union of the names: a buffer may be on some replicas only."""
    all_snapshots = list(snapshots)
    # The keys of a dictionary, to keep the order.
    union: dict[str, None] = {}
    for snapshot in all_snapshots:
        union.update(dict.fromkeys(_get_buffers(snapshot) or ()))

    agreed = []
    for snapshot in all_snapshots:
        metadata = snapshot.metadata
        if metadata is not None and metadata.buffers is not None:
            agreed.append(replace(snapshot, metadata=replace(metadata, buffers=tuple(union))))
        else:
            agreed.append(snapshot)

    return agreed


def _get_buffers(snapshot: Snapshot) -> tuple[str, ...] | None:
    return None if snapshot.metadata is None else snapshot.metadata.buffers


def _make_tensor(name: str, description: TensorLocation, path: str, parameter: bool) -> Tensor:
    return Tensor(
        name=name,
        dtype=description.dtype.name if description.dtype else "unknown",
        shape=description.shape,
        strides=description.strides,
        path=path,
        offset=0,
        refused=description.refused,
        data=description.content if isinstance(description, MemoryTensor) else None,
        parameter=parameter,
        sharding=description.sharding,
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
        statistic = normalized.get(f"{add_dot(name)}running_mean")
        if statistic is not None:
            momentum[statistic.removesuffix("running_mean").removesuffix(".")] = value

    def normalize_present(names: Iterable[str]) -> tuple[str, ...]:
        """Return the normalized names of those that are names of tensors."""
        return tuple(normalized[name] for name in names if name in normalized)

    averaged: list[str] = []
    for name in tree.averaged:
        averaged += list_spellings(name)

    metadata = block or Metadata()
    return replace(
        metadata,
        buffers=normalize_present(tree.buffers),
        frozen=normalize_present(tree.frozen),
        averaged=tuple(averaged),
        bn_momentum=momentum,
        optimizer_sharded=metadata.optimizer_sharded or tree.partitioned,
        # To detect a rank that has lost all states of its parameters, which no other rank has.
        optimizer_parameters=metadata.optimizer_parameters or normalize_present(tree.local_parameters),
        no_sync=tree.no_sync,
        buffers_synced=metadata.buffers_synced if tree.buffers_synced is None else tree.buffers_synced,
    )
