"""Join the files of all ranks of a checkpoint into one model with whole tensors."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.frozen import replace
from syncheck.layout import deepspeed, megatron, megatron_stacks
from syncheck.layout.alignment import align
from syncheck.layout.boxes import combine
from syncheck.layout.copies import find_shared_tensors
from syncheck.layout.dtensors import find_shards, is_sharded
from syncheck.layout.progress import check_progress
from syncheck.messages import Refusal
from syncheck.snapshots import Shard
from syncheck.tensors.names import normalize_keys
from syncheck.tensors.value_kinds import is_membership

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.layout.replica_groups import ReplicaGroups
    from syncheck.messages import Message
    from syncheck.snapshots import Membership, Snapshot, Tensor

# Limits of boxes: a number for each part of a tensor in a file, and a number for all tensors together.
_BOXES_PER_SHARD, _MOST_BOXES = 8, 1 << 16
# Formats whose folders store partitions or stacks of tensors, and how their tensors are joined.
_JOINED_FORMATS = {"dcp": megatron_stacks.unstack, "deepspeed": deepspeed.join}


def join(snapshots: Mapping[int, Snapshot], path: str) -> Snapshot:
    """Return one checkpoint with the tensors of all ranks. snapshots: by rank. path: of the result.

    Names lose the prefixes of wrappers. A tensor in the files of several ranks is taken from the first of them:
    `compare` finds differences between copies. A tensor whose parts have no known position is refused. Raises
    MalformedFile for a tensor with a hole, and for files of different steps or runs.
    """
    check_progress(snapshots.values())
    snapshots = {rank: _join_folder(snapshot) for rank, snapshot in snapshots.items()}
    first = next(iter(snapshots.values()))
    metadata = first.metadata
    if metadata is not None:
        metadata = replace(
            metadata,
            mesh={},
            rank=None,
            optimizer_sharded=False,
            world_size=None,
            tied={},
        )

    is_single_whole = len(snapshots) == 1 and not any(map(is_sharded, first.tensors.values()))
    if is_single_whole:
        tensors = {name: _without_layout(tensor) for name, tensor in first.tensors.items()}
        return replace(
            first,
            path=path,
            mesh={},
            metadata=metadata,
            numbered=(),
            tensors=tensors,
        )

    # Optimizers may number their parameters, so names are needed before the tensors are joined.
    alignment = align(snapshots)
    named = alignment.snapshots
    stubs: set[str] = set()
    notes: dict[Message, None] = {}
    for snapshot in named.values():
        stubs.update(snapshot.stubs)
        notes |= dict.fromkeys(snapshot.notes)

    return replace(
        first,
        path=path,
        bytes=sum(snapshot.bytes for snapshot in named.values()),
        tensors=_join_tensors(alignment, path),
        values=_join_values(named),
        stubs=tuple(sorted(stubs)),
        metadata=metadata,
        notes=tuple(notes),
        ties=(),
        mesh={},
        host=None,
        numbered=(),
        shard_labels=frozenset(),
        model_values=_join_model_values(named),
    )


def _without_layout(tensor: Tensor) -> Tensor:
    if tensor.sharding is None:
        return tensor

    return replace(tensor, sharding=None)


def _join_tensors(alignment: Alignment, path: str) -> dict[str, Tensor]:
    """Return the whole tensors by name. path: of the result. Raises MalformedFile for too many boxes, and for holes."""
    aligned = dict(alignment.tensors)
    # Each copy in the model keeps its name and its bytes; of the optimizer's state, a whole model has one copy.
    for name, tensors_of_copy in alignment.separate_copies.items():
        if not name.startswith("optimizer."):
            aligned[name] = tensors_of_copy

    # Joining cuts boxes, and untrusted files could make it cut any number of them.
    most = _MOST_BOXES
    for by_rank in aligned.values():
        most += sum(_BOXES_PER_SHARD + len(tensor.shards) for tensor in by_rank.values())

    joined: dict[str, Tensor] = {}
    box_count = 0
    for name, by_rank in aligned.items():
        replica_groups = alignment.find_replica_groups(name, by_rank)
        is_unclear = alignment.optimizer.unclear is not None and name.startswith("optimizer.")
        tensor = _join_tensor(
            name,
            by_rank,
            replica_groups,
            path,
            unclear=is_unclear,
        )
        joined[name] = tensor if tensor.refused else _without_layout(tensor)
        box_count += len(tensor.shards)
        if box_count > most:
            raise MalformedFile(path, found=f"tensors in more than {most} parts", needed="a readable layout")

    return joined


def split_folder(snapshot: Snapshot) -> dict[int, Snapshot]:
    """Return the files of all ranks of a folder, by rank, if its format is known to divide tensors by name."""
    if snapshot.format == "megatron":
        return megatron.split(snapshot)

    return {0: snapshot}


def _join_folder(snapshot: Snapshot) -> Snapshot:
    """Return a checkpoint folder with whole tensors, if its format is known to store partitions."""
    join_format = _JOINED_FORMATS.get(snapshot.format)
    if join_format is None:
        return snapshot

    return join_format(snapshot)


def add_tied_names(
    models: Sequence[Snapshot],
    listed_ties: Iterable[tuple[str, str]],
    are_separate: Sequence[Callable[[str, str], bool]],
) -> list[tuple[Snapshot, tuple[str, ...]]]:
    """Add the names of tied tensors that only another model stores. Return each model with the added names.

    torch.save stores all names of tensors that share memory, and `save_pretrained` stores one of them.
    listed_ties: pairs of tied names in the metadata of the files.
    are_separate: for each model, whether a configuration states that two names of it are two weights.
    """
    tensors_of_models = [normalize_keys(model.tensors) for model in models]
    ties: list[Sequence[str]] = [*listed_ties]
    for tensors in tensors_of_models:
        renamed = [replace(tensor, name=name) for name, tensor in tensors.items()]
        ties += find_shared_tensors(renamed)

    completed = []
    for model, tensors, is_separate in zip(models, tensors_of_models, are_separate, strict=True):
        added_tensors = _find_tied_tensors(tensors, ties, is_separate)
        if added_tensors:
            model = replace(model, tensors=tensors | added_tensors)

        completed.append((model, tuple(added_tensors)))

    return completed


def _find_tied_tensors(
    tensors: Mapping[str, Tensor], ties: Iterable[Sequence[str]], is_separate: Callable[[str, str], bool]
) -> dict[str, Tensor]:
    """Return the tensors under the names that a model lacks, if it has another name of the same tie.

    is_separate: see `add_tied_names`.
    """
    tied_tensors: dict[str, Tensor] = {}
    for tie in ties:
        present_names = [name for name in tie if name in tensors]
        if not present_names:
            continue

        # All names of a tie stand for equal bytes, so any of them will do.
        for name in tie:
            if name not in tensors and not is_separate(name, present_names[0]):
                tied_tensors[name] = replace(tensors[present_names[0]], name=name)

    return tied_tensors


def _join_tensor(
    name: str, by_rank: Mapping[int, Tensor], replica_groups: ReplicaGroups, path: str, *, unclear: bool
) -> Tensor:
    """Return the whole tensor from the shards or copies of it that ranks hold.

    path: of the checkpoint.
    unclear: whether ranks may hold shards that look like copies.
    """
    for tensor in by_rank.values():
        if tensor.refused:
            return replace(tensor, name=name)

    if unclear:
        return _refuse(by_rank, name, replica_groups)

    whole_tensors = [tensor for tensor in by_rank.values() if not is_sharded(tensor)]
    if not whole_tensors:
        return _join_boxes(
            name,
            by_rank,
            replica_groups=replica_groups,
            path=path,
        )

    # Ranks in several sets hold different parts, and files do not show the position of plain parts.
    if len(whole_tensors) == len(by_rank) and len(replica_groups.sets) > 1:
        return _refuse(by_rank, name, replica_groups)

    return replace(whole_tensors[0], name=name)


def _join_boxes(name: str, by_rank: Mapping[int, Tensor], replica_groups: ReplicaGroups, path: str) -> Tensor:
    """Return the tensor that the boxes of all ranks cover. Parameters as in `_join_tensor`."""
    first = next(iter(by_rank.values()))
    set_of_rank: dict[int, int] = {}
    for number, ranks in enumerate(replica_groups.sets):
        set_of_rank |= dict.fromkeys(ranks, number)

    shards: list[Shard] = []
    set_of_box: dict[Hashable, int] = {}
    for rank, tensor in by_rank.items():
        shards_of_rank = find_shards(rank, tensor)
        is_same_tensor = (tensor.dtype, tensor.full_shape) == (first.dtype, first.full_shape)
        if shards_of_rank is None or not is_same_tensor:
            return _refuse(by_rank, name, replica_groups)

        shards += shards_of_rank
        for shard in shards_of_rank:
            box = (shard.start, shard.tensor.shape)
            # If ranks with one box are not copies of each other, they hold different tensors of this name.
            if set_of_box.setdefault(box, set_of_rank[rank]) != set_of_rank[rank]:
                return _refuse(by_rank, name, replica_groups)

    return combine(
        name=name,
        dtype=first.dtype,
        shape=first.full_shape,
        shards=shards,
        path=path,
    )


def _refuse(by_rank: Mapping[int, Tensor], name: str, replica_groups: ReplicaGroups) -> Tensor:
    """Return the first part of a tensor, refused, with the sizes of all parts: copies of a part count once."""
    layout = replica_groups.layout or replica_groups.kind
    sizes: list[int] = []
    for first_rank, *_ in replica_groups.sets:
        sizes.append(by_rank[first_rank].numel)

    return replace(
        next(iter(by_rank.values())),
        name=name,
        refused=Refusal.UNPLACED_PARTS(layout=layout),
        unplaced=tuple(sizes),
    )


def _join_values(snapshots: Mapping[int, Snapshot]) -> dict[str, Any]:
    """Return the values of all ranks. If ranks differ, the first counts, except lists of parameters: none counts."""
    values_by_name: dict[str, list[Any]] = defaultdict(list)
    for snapshot in snapshots.values():
        for name, value in snapshot.values.items():
            values_by_name[name].append(value)

    joined: dict[str, Any] = {}
    for name, values in values_by_name.items():
        # Each rank of a partitioned optimizer lists its own parameters.
        is_same_on_all_ranks = values.count(values[0]) == len(snapshots)
        if is_same_on_all_ranks or not is_membership(name):
            joined[name] = values[0]

    return joined


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
            yield name, rank, tensor, _locate_tensor(rank, tensor)


def _locate_tensor(rank: int, tensor: Tensor) -> list[Shard] | None:
    """Return the boxes of a tensor in the file of a rank; None if their position is unknown."""
    if is_sharded(tensor):
        return find_shards(rank, tensor)

    if tensor.shards:
        return [*tensor.shards]

    # A tensor in one piece is a box that starts at its first element.
    start = (0,) * len(tensor.shape)
    return [Shard(tensor, start)]
