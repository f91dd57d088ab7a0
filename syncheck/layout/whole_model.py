"""Join the files of all ranks of a checkpoint into one model with whole tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.layout import deepspeed, megatron
from syncheck.layout.alignment import align
from syncheck.layout.boxes import combine
from syncheck.layout.copies import find_shared_tensors
from syncheck.layout.dtensors import find_shards, is_whole
from syncheck.layout.progress import check_progress
from syncheck.messages import Refusal
from syncheck.snapshots import Shard
from syncheck.tensors.names import normalize_keys
from syncheck.tensors.value_kinds import is_membership

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from syncheck.layout.replica_groups import ReplicaSets
    from syncheck.snapshots import Membership, Snapshot, Tensor

# Limits of boxes: a number for each part of a tensor in a file, and a number for all tensors together.
_BOXES_PER_SHARD, _MOST_BOXES = 8, 1 << 16


def join(snapshots: Mapping[int, Snapshot], path: str) -> Snapshot:
    """Return one checkpoint with the tensors of all ranks. snapshots: by rank. path: of the result.

    Names lose the prefixes of wrappers. A tensor in the files of several ranks is taken from the first of them:
    `compare` finds differences between copies. A tensor whose parts have no known position is refused. Raises
    MalformedFile for a tensor with a hole, and for files of different steps or runs.
    """
    check_progress(snapshots.values())
    snapshots = {rank: _join_folder(snapshot) for rank, snapshot in snapshots.items()}
    first = next(iter(snapshots.values()))
    metadata = first.metadata and replace(
        first.metadata, mesh={}, rank=None, optimizer_sharded=False, world_size=None, tied={}
    )
    if len(snapshots) == 1 and all(t.sharding is None or is_whole(t.sharding) for t in first.tensors.values()):
        whole = {name: t if t.sharding is None else replace(t, sharding=None) for name, t in first.tensors.items()}
        return replace(first, path=path, mesh={}, metadata=metadata, numbered=(), tensors=whole)
    alignment = align(snapshots)
    named = alignment.snapshots
    aligned = dict(alignment.tensors)
    # Each copy in the model keeps its name and its bytes; of the optimizer's state, a whole model has one copy.
    for name, tensors_of_copy in alignment.separate_copies.items():
        if not name.startswith("optimizer."):
            aligned[name] = tensors_of_copy
    tensors: dict[str, Tensor] = {}
    given = sum(_BOXES_PER_SHARD + len(tensor.shards) for held in aligned.values() for tensor in held.values())
    left = most = _MOST_BOXES + given
    for name, held in aligned.items():
        replica_sets = alignment.find_replica_sets(name, held)
        unclear = alignment.optimizer.unclear if name.startswith("optimizer.") else None
        joined = _join_tensor(name, held, replica_sets, path, unclear=unclear is not None)
        tensors[name] = joined if joined.refused else replace(joined, sharding=None)
        left -= len(tensors[name].shards)
        if left < 0:
            raise MalformedFile(path, found=f"tensors in more than {most} parts", needed="a readable layout")
    return replace(
        first, path=path, bytes=sum(s.bytes for s in snapshots.values()), tensors=tensors, values=_join_values(named),
        stubs=tuple(sorted({stub for s in named.values() for stub in s.stubs})), metadata=metadata,
        notes=tuple(dict.fromkeys(note for s in named.values() for note in s.notes)), ties=(), mesh={}, host=None,
        numbered=(), shard_labels=frozenset(), model_values=_join_model_values(named),
    )  # fmt: skip


def split_folder(snapshot: Snapshot) -> dict[int, Snapshot]:
    """Return the files of all ranks of a folder, by rank, if its format is known to divide tensors by name."""
    return megatron.split(snapshot) if snapshot.format == "megatron" else {0: snapshot}


def _join_folder(snapshot: Snapshot) -> Snapshot:
    """Return a checkpoint folder with whole tensors, if its format is known to store partitions."""
    if snapshot.format == "dcp":
        return megatron.unstack(snapshot)
    return deepspeed.join(snapshot) if snapshot.format == "deepspeed" else snapshot


def add_tied_names(
    models: Sequence[Snapshot], listed: Iterable[tuple[str, str]] = ()
) -> list[tuple[Snapshot, tuple[str, ...]]]:
    """Add the names of tied tensors that only another model stores. Return each model with the added names.

    torch.save stores all names of tensors that share memory, and `save_pretrained` stores one of them.
    listed: pairs of tied names in the metadata of the files.
    """
    named = [normalize_keys(model.tensors) for model in models]
    ties = [list(pair) for pair in listed]
    for tensors in named:
        ties += find_shared_tensors([replace(tensor, name=name) for name, tensor in tensors.items()])
    completed = []
    for model, tensors in zip(models, named, strict=True):
        added = {
            name: replace(tensors[stored[0]], name=name)
            for tie in ties
            if (stored := [name for name in tie if name in tensors])
            for name in tie
            if name not in tensors
        }
        completed.append((replace(model, tensors=tensors | added) if added else model, tuple(added)))
    return completed


def _join_tensor(
    name: str, held: Mapping[int, Tensor], replica_sets: ReplicaSets, path: str, *, unclear: bool
) -> Tensor:
    """Return the whole tensor from the parts or copies of it that ranks hold."""
    first = next(iter(held.values()))
    refused = next((tensor for tensor in held.values() if tensor.refused), None)
    if refused is not None:
        return replace(refused, name=name)
    whole = {r: t for r, t in held.items() if t.sharding is None or is_whole(t.sharding)}
    if len(whole) == len(held) or (whole and not unclear):
        # Ranks in several sets hold different parts, and files do not show the position of plain parts.
        if unclear or (len(whole) == len(held) and len(replica_sets.sets) > 1):
            return _refuse(first, name, replica_sets)
        return replace(next(iter(whole.values())), name=name)
    shape = first.sharding.shape if first.sharding is not None else ()
    boxes: list[Shard] = []
    set_of = {rank: i for i, ranks in enumerate(replica_sets.sets) for rank in ranks}
    holders: dict[Hashable, int] = {}
    for rank, tensor in held.items():
        found = find_shards(rank, tensor)
        same = tensor.dtype == first.dtype and tensor.sharding is not None and tensor.sharding.shape == shape
        if found is None or not same or unclear:
            return _refuse(first, name, replica_sets)
        boxes += found
        # If ranks with one box are not copies of each other, they hold different tensors of this name.
        if any(holders.setdefault((b.start, b.tensor.shape), set_of[rank]) != set_of[rank] for b in found):
            return _refuse(first, name, replica_sets)
    return combine(name, first.dtype, shape, boxes, path)


def _refuse(tensor: Tensor, name: str, replica_sets: ReplicaSets) -> Tensor:
    return replace(tensor, name=name, refused=Refusal.UNPLACED_PARTS(layout=replica_sets.layout or replica_sets.kind))


def _join_values(snapshots: Mapping[int, Snapshot]) -> dict[str, Any]:
    """Return the values of all ranks. If ranks differ, the first counts, except lists of parameters: none counts."""
    by_name: dict[str, list[Any]] = defaultdict(list)
    for snapshot in snapshots.values():
        for name, value in snapshot.values.items():
            by_name[name].append(value)
    return {
        name: found[0]
        for name, found in by_name.items()
        if not is_membership(name) or (len(found) == len(snapshots) and all(value == found[0] for value in found))
    }


def _join_model_values(snapshots: Mapping[int, Snapshot]) -> dict[str, Membership]:
    """Return the values of the model on all ranks; pipeline stages have different values."""
    joined: dict[str, Membership] = {}
    for snapshot in snapshots.values():
        for name, membership in snapshot.model_values.items():
            joined.setdefault(name, membership)
    return joined


def locate_shards(snapshots: Mapping[int, Snapshot]) -> Iterator[tuple[str, int, Tensor, list[Shard] | None]]:
    """Yield (name, rank, tensor, its boxes) for each tensor in each file; None if its position is unknown.

    snapshots: the files of one model, by rank.
    """
    for rank, snapshot in snapshots.items():
        for name, tensor in normalize_keys(_join_folder(snapshot).tensors).items():
            if tensor.sharding is not None and not is_whole(tensor.sharding):
                yield name, rank, tensor, find_shards(rank, tensor)
            else:
                yield name, rank, tensor, list(tensor.shards) or [Shard(tensor, (0,) * len(tensor.shape))]
