"""Detect partitioned optimizer state, as in ZeRO, and find lost partitions.

Evidence of partitioning:
- The metadata lists the parameters of each rank.
- Each rank numbers its own parameters from 0 (ZeroRedundancyOptimizer, FairScale OSS). The shapes under one number
  differ between ranks, and the ranks together have at most the parameters of the model. If the shapes are those of
  ZeroRedundancyOptimizer's partition, its parameters get their names.
  A rank with as many parameters as other ranks, of the same shapes, is no partition: its model lacks tensors, or has
  more (`numbered_state`).
- DeepSpeed folders of several nodes contain labelled partitions of the ranks of their node.
- All ranks list all parameters, and only the owner of a parameter holds its state (`owners`).
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.frozen import record
from syncheck.layout.copies import find_shared_tensors
from syncheck.layout.numbered_state import STATE, find_shapes, list_numbers, name_by_other_ranks, rename_parameters
from syncheck.layout.owners import LostState, find_owners
from syncheck.layout.zero_redundancy import repeat_partition
from syncheck.messages import Detail
from syncheck.records import Reason, TensorDiff
from syncheck.snapshots import are_naturals
from syncheck.tensors.kinds import classify_tensors
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot, Tensor

    OwnParameters = Mapping[int, AbstractSet[str]]
    _Shape = tuple[int, ...]


@record
class OptimizerShards:
    """How optimizer state is partitioned over ranks. By default, each rank holds all of it."""

    own_parameters: OwnParameters = field(default_factory=dict)
    """The parameters of each rank."""
    labels: frozenset[str] = frozenset()
    """Labels of shards that one replica stores."""
    unclear: Message | None = None
    """Why different states may be partitions or out of sync."""
    owned: frozenset[str] = frozenset()
    """Parameters with state on their owners only."""
    lost: tuple[LostState, ...] = ()
    """State that no file contains, although its owner is known."""

    def may_hold(self, name: str, *, of_optimizer: bool) -> bool:
        """Whether a tensor is, or may be, part of partitioned state."""
        if self.labels:
            return not self.labels.isdisjoint(name.split(".")[:2])

        is_partitioned = bool(self.own_parameters) or self.unclear is not None
        return of_optimizer and is_partitioned


class Detected(NamedTuple):
    """A detected partition.

    snapshots: by rank, with names for the parameters that each rank numbers.
    optimizer: the partition.
    """

    snapshots: Mapping[int, Snapshot]
    optimizer: OptimizerShards


def detect_partitioning(snapshots: Mapping[int, Snapshot]) -> Detected:
    """Detect how optimizer state is partitioned.

    If each rank numbers its own parameters from 0, replace the numbers by names of parameters if the partition is
    known, and by `(rank 1).0` otherwise.
    """
    snapshots = name_by_other_ranks(snapshots)
    # The record of a file comes before a guess from shapes.
    for detect in (_detect_by_metadata, _detect_by_label, _detect_by_numbers):
        detected = detect(snapshots)
        if detected is not None:
            return detected

    by_owner = _detect_by_owner(snapshots)
    return Detected(snapshots, by_owner or OptimizerShards())


def _detect_by_metadata(snapshots: Mapping[int, Snapshot]) -> Detected | None:
    """Detect a partition that the metadata of all ranks lists."""
    own_parameters: dict[int, AbstractSet[str]] = {}
    for rank, snapshot in snapshots.items():
        metadata = snapshot.metadata
        # One rank without the list leaves the partition unknown.
        if metadata is None or not metadata.optimizer_sharded:
            return None

        own_parameters[rank] = _normalize_names(metadata.optimizer_parameters)

    optimizer = None
    # If each rank lists all parameters, only the states show their owners.
    if len(set(own_parameters.values())) == 1:
        optimizer = _detect_by_owner(snapshots)

    return Detected(snapshots, optimizer or OptimizerShards(own_parameters))


def _detect_by_label(snapshots: Mapping[int, Snapshot]) -> Detected | None:
    """Detect folders of several nodes: disjoint labels, complete together."""
    all_labels: set[str] = set()
    count = 0
    world_sizes: set[tuple[Any, Any]] = set()
    for snapshot in snapshots.values():
        all_labels |= snapshot.shard_labels
        count += len(snapshot.shard_labels)
        # The folders of one run record the same sizes.
        values = snapshot.values
        world_sizes.add((values.get("dp_world_size"), values.get("mp_world_size")))

    if not all_labels:
        return None

    # Replicas store the same shards.
    if len(all_labels) < count:
        return Detected(snapshots, OptimizerShards())

    optimizer = OptimizerShards(labels=frozenset(all_labels))
    if not _is_complete(len(all_labels), world_sizes):
        optimizer = replace(optimizer, unclear=Detail.INCOMPLETE_PARTITIONING())

    return Detected(snapshots, optimizer)


def _is_complete(count: int, world_sizes: Collection[tuple[Any, Any]]) -> bool:
    """Whether there are as many shards as ranks. world_sizes: data-parallel and model-parallel, of each folder."""
    if len(world_sizes) > 1:
        return False

    ((data_parallel, model_parallel),) = world_sizes
    # The values are of a file, so they may be anything.
    if not are_naturals([data_parallel, model_parallel]):
        return False

    rank_count: int = data_parallel * model_parallel
    return count == rank_count


def _detect_by_numbers(snapshots: Mapping[int, Snapshot]) -> Detected | None:
    """Detect a partition from optimizers that number their parameters, or from ranks that name them differently."""
    parameters_by_rank = {rank: snapshot.numbered for rank, snapshot in snapshots.items()}
    lists = set(parameters_by_rank.values())
    longest = max(lists, key=len)
    if len(snapshots) < 2 or not longest:
        return None

    # Replicas number their parameters alike, and shapes determine their names.
    is_named = not longest[0].isdecimal()
    if is_named and len(lists) == 1:
        return None

    # Names derived from the shapes on one rank prove nothing if the ranks number different parameters.
    optimizers = {rank: _number_parameters(snapshot) for rank, snapshot in snapshots.items()}
    detected = _detect_by_shapes(optimizers)
    if detected.optimizer != OptimizerShards():
        return detected

    # Ranks with equal lists are replicas, and names can be shared only between lists of one length.
    counts = set(map(len, lists))
    if len(lists) == 1 or len(counts) > 1:
        return None

    shared = _share_names(optimizers, parameters_by_rank.values())
    optimizer = _detect_by_owner(shared)
    # Without owners, the names of each rank remain, as in the comparison of a running job.
    if optimizer is None:
        return Detected(snapshots, OptimizerShards())

    return Detected(shared, optimizer)


@record
class _NumberedOptimizer:
    """The optimizer of a rank, which numbers its parameters from 0."""

    snapshot: Snapshot
    count: int
    """The number of parameters."""
    shapes: Mapping[int, _Shape]
    """The shape of the state of each parameter with a state."""

    @property
    def has_named_state(self) -> bool:
        """Whether the rank numbers no parameter, and has the state of parameters by name."""
        return self.count == 0 and any(name.startswith("optimizer.") for name in self.snapshot.tensors)

    def rename(self, names: Sequence[str]) -> Snapshot:
        """Return the checkpoint with names for the numbers of parameters."""
        return rename_parameters(self.snapshot, list_numbers(len(names)), names)


def _number_parameters(snapshot: Snapshot) -> _NumberedOptimizer:
    """Return the optimizer of a rank with numbers for all names that its shapes determined."""
    count = len(snapshot.numbered)
    numbered = rename_parameters(snapshot, snapshot.numbered, list_numbers(count))
    shapes = find_shapes(numbered) if count else {}
    return _NumberedOptimizer(numbered, count, shapes)


def _count_names(parameters: Iterable[str]) -> int:
    return sum(not parameter.isdecimal() for parameter in parameters)


def _share_names(optimizers: Mapping[int, _NumberedOptimizer], lists: Iterable[tuple[str, ...]]) -> dict[int, Snapshot]:
    """Name the parameters of all ranks as on the rank with the most names.

    The shapes of few states may determine no names, or others. Replicas number their parameters in the same order.
    lists: the parameters of the ranks, by name or number.
    """
    best_names = max(lists, key=_count_names)
    return {rank: optimizer.rename(best_names) for rank, optimizer in optimizers.items()}


def _detect_by_owner(snapshots: Mapping[int, Snapshot]) -> OptimizerShards | None:
    owners = find_owners(snapshots)
    if owners is None:
        return None

    return OptimizerShards(
        owners.by_rank,
        owned=frozenset(owners.owned),
        lost=tuple(owners.lost),
    )


def _normalize_names(parameters: Iterable[str]) -> frozenset[str]:
    """Return the names of parameters as in the names of their states, without prefixes of wrappers."""
    return frozenset(normalize(f"optimizer.{parameter}" for parameter in parameters).values())


def _detect_by_shapes(optimizers: Mapping[int, _NumberedOptimizer]) -> Detected:
    """Decide by shapes whether the ranks number different parameters of one model. optimizers: by rank."""
    snapshots: dict[int, Snapshot] = {}
    counts: list[int] = []
    for rank, optimizer in optimizers.items():
        snapshots[rank] = optimizer.snapshot
        counts.append(optimizer.count)

    parameters = _list_parameters(next(iter(snapshots.values())))
    # Partitions together have at most the parameters of the model.
    if sum(counts) > len(parameters) or not _are_of_model(optimizers.values(), parameters.values()):
        return Detected(snapshots, OptimizerShards())

    has_all_parameters = sum(counts) == len(parameters)
    is_partition = _contradict_each_other(optimizers.values())
    # Replicas have the same number of parameters. A rank without parameters may have their state by name.
    distinct_counts = set(counts) - {0}
    if has_all_parameters and len(distinct_counts) > 1:
        is_partition = True

    # A rank without numbered parameters has no state, or the state of all parameters by name.
    has_whole_state = any(optimizer.has_named_state for optimizer in optimizers.values())
    if is_partition and not has_whole_state:
        return _name_partition(optimizers, parameters)

    all_ranks_have_state = all(optimizer.shapes for optimizer in optimizers.values())
    unclear: Message | None = None
    if has_whole_state or (has_all_parameters and all_ranks_have_state):
        unclear = Detail.UNCLEAR_PARTITIONING()

    return Detected(snapshots, OptimizerShards(unclear=unclear))


def _are_of_model(optimizers: Iterable[_NumberedOptimizer], parameters: Iterable[_Shape]) -> bool:
    """Whether the model has a parameter for each state of all ranks. parameters: their shapes."""
    state_shapes: Counter[_Shape] = Counter()
    for optimizer in optimizers:
        state_shapes.update(optimizer.shapes.values())

    return state_shapes <= Counter(parameters)


def _contradict_each_other(optimizers: Iterable[_NumberedOptimizer]) -> bool:
    """Whether two ranks have states of different shapes under one number, which cannot be one parameter."""
    shape_of_number: dict[int, _Shape] = {}
    for optimizer in optimizers:
        for number, shape in optimizer.shapes.items():
            if shape_of_number.setdefault(number, shape) != shape:
                return True

    return False


def _name_partition(optimizers: Mapping[int, _NumberedOptimizer], parameters: Mapping[str, _Shape]) -> Detected:
    """Name the parameters that each rank numbers from 0, by the known partition or else by their rank.

    optimizers: by rank.
    parameters: shapes of the parameters of the model.
    """
    groups = {rank: _list_groups(optimizer) for rank, optimizer in optimizers.items()}
    names_by_rank = repeat_partition(parameters, groups)
    renamed: dict[int, Snapshot] = {}
    own_parameters: dict[int, frozenset[str]] = {}
    for rank, optimizer in optimizers.items():
        names = [f"(rank {rank}).{number}" for number in range(optimizer.count)]
        if names_by_rank:
            names = names_by_rank[rank][: optimizer.count]

        renamed[rank] = optimizer.rename(names)
        own_parameters[rank] = _normalize_names(names)

    return Detected(renamed, OptimizerShards(own_parameters))


def _list_parameters(snapshot: Snapshot) -> dict[str, _Shape]:
    """Return the shapes of the model's parameters in their order. Tied parameters count once, as in an optimizer."""
    model: list[Tensor] = []
    shapes: dict[str, _Shape] = {}
    for name, tensor in snapshot.tensors.items():
        if not re.fullmatch(STATE, name):
            model.append(tensor)
            shapes[name] = tensor.full_shape

    kinds = classify_tensors(shapes, None).by_name
    parameters = {name: shape for name, shape in shapes.items() if kinds[name] == "parameter"}
    # Sharing memory shows only if the file stores the model with torch.save.
    for _, *later_names in find_shared_tensors(model):
        for name in later_names:
            parameters.pop(name, None)

    return parameters


def _list_groups(optimizer: _NumberedOptimizer) -> list[list[_Shape | None]]:
    """List the shapes of numbered parameters by parameter group; None without a state."""
    remaining_shapes = [optimizer.shapes.get(number) for number in range(optimizer.count)]
    groups: list[list[_Shape | None]] = []
    for size in _list_group_sizes(optimizer.snapshot):
        groups.append(remaining_shapes[:size])
        remaining_shapes = remaining_shapes[size:]

    if remaining_shapes:
        groups.append(remaining_shapes)

    return groups


def _list_group_sizes(snapshot: Snapshot) -> Iterator[int]:
    """Yield the number of parameters of each parameter group."""
    for number in itertools.count():
        positions = snapshot.values.get(f"optimizer.param_groups.{number}.(positions)")
        if not isinstance(positions, str):
            return

        # The text of an empty group has no position.
        yield len(positions.split(",")) if positions else 0


def find_lost_state(optimizer: OptimizerShards, aligned: Mapping[str, Mapping[int, Tensor]]) -> Iterator[TensorDiff]:
    """Yield the missing state of ranks without state for their own parameters, if other ranks have state.

    No file contains the missing tensors. A single parameter without state is not reported, because it may never have
    had a gradient. If no rank has state, as with plain SGD, nothing is reported. aligned: tensors by name and rank.
    """
    dtypes_by_rank: dict[int, dict[str, str]] = {rank: {} for rank in optimizer.own_parameters}
    for name, tensors in aligned.items():
        parameter, _, state = name.rpartition(".")
        for rank, tensor in tensors.items():
            if parameter in optimizer.own_parameters.get(rank, ()):
                dtypes_by_rank[rank][state] = tensor.dtype

    dtypes: dict[str, str] = {}
    for dtypes_of_rank in dtypes_by_rank.values():
        dtypes |= dtypes_of_rank

    lost_states: list[LostState] = []
    for rank, parameters in optimizer.own_parameters.items():
        if not dtypes_by_rank[rank]:
            lost_states += [LostState(rank, parameter, frozenset(dtypes)) for parameter in sorted(parameters)]

    for lost in (*lost_states, *optimizer.lost):
        yield from _describe_lost(lost, dtypes, aligned)


def _describe_lost(
    lost: LostState, dtypes: Mapping[str, str], aligned: Mapping[str, Mapping[int, Tensor]]
) -> Iterator[TensorDiff]:
    """Yield a diff for each missing tensor of a state. dtypes: of the tensors of all states, by name."""
    for state, dtype in dtypes.items():
        name = f"{lost.parameter}.{state}"
        kind = "optimizer_step" if state == "step" else "optimizer"
        if state in lost.states and name not in aligned:
            yield TensorDiff(
                name=name,
                kind=kind,
                dtype=dtype,
                shape=(),
                status="not_compared",
                reason=Reason.MISSING,
                detail=Detail.OWN_PART_MISSING(rank=lost.rank),
                replica_groups=((lost.rank,),),
                minority=(lost.rank,),
            )
