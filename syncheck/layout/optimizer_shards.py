"""Detect partitioned optimizer state, as in ZeRO, and find lost partitions.

Evidence of partitioning:
- The metadata lists the parameters of each rank.
- Each rank numbers its own parameters from 0 (ZeroRedundancyOptimizer, FairScale OSS). The shapes under one number
  differ between ranks, and the ranks together have at most the parameters of the model. If the shapes are those of
  ZeroRedundancyOptimizer's partition, its parameters get their names.
- DeepSpeed folders of several nodes contain labelled partitions of the ranks of their node.
- All ranks list all parameters, and only the owner of a parameter holds its state (`owners`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

from syncheck.layout.copies import find_shared_tensors
from syncheck.layout.owners import find_owners
from syncheck.messages import Detail
from syncheck.records import Reason, TensorDiff
from syncheck.tensors.kinds import classify_tensors
from syncheck.tensors.names import normalize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.layout.owners import LostState
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot, Tensor

    Own = Mapping[int, frozenset[str]]
    _Shape = tuple[int, ...]

_STATE = re.compile(r"optimizer\.(\d+)\.([^.]+)")


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    """How optimizer state is partitioned.

    own: the parameters of each rank. labels: labels of parts stored by one replica only. unclear: why
    different states may be partitions or out of sync. owned: parameters with state on their owners only. lost: state
    that no file contains, although its owner is known.
    """

    own: Own = field(default_factory=dict)
    labels: frozenset[str] = frozenset()
    unclear: Message | None = None
    owned: frozenset[str] = frozenset()
    lost: tuple[LostState, ...] = ()

    def holds(self, name: str, *, of_optimizer: bool) -> bool:
        """Whether a tensor is, or may be, part of partitioned state."""
        if self.labels:
            return not self.labels.isdisjoint(name.split(".")[:2])
        return of_optimizer and bool(self.own or self.unclear)


def detect_partitioning(snapshots: Mapping[int, Snapshot]) -> tuple[Mapping[int, Snapshot], OptimizerShards]:
    """Detect how optimizer state is partitioned.

    If each rank numbers its own parameters from 0, replace the numbers by names of parameters if the partition is
    known, and by `(rank 1).0` otherwise.
    """
    blocks = {
        rank: s.metadata for rank, s in snapshots.items() if s.metadata is not None and s.metadata.optimizer_sharded
    }
    if len(blocks) == len(snapshots):
        own = {rank: _full_names(block.optimizer_parameters) for rank, block in blocks.items()}
        # If each rank lists all parameters, only the states show their owners.
        return snapshots, (_detect_by_owner(snapshots) if len({*own.values()}) == 1 else None) or OptimizerShards(own)
    if any(snapshot.shard_labels for snapshot in snapshots.values()):
        return snapshots, _detect_by_label([snapshot.shard_labels for snapshot in snapshots.values()], snapshots)
    lists = {snapshot.numbered for snapshot in snapshots.values()}
    names = [name for numbered in lists for name in numbered]
    if len(snapshots) > 1 and names and (len(lists) > 1 or names[0].isdecimal()):
        # Names derived from the shapes on one rank prove nothing if the ranks number different parameters.
        numbers = {rank: {name: str(i) for i, name in enumerate(s.numbered)} for rank, s in snapshots.items()}
        numbered = {rank: _rename_parameters(s, numbers[rank]) for rank, s in snapshots.items()}
        renamed, parts = _detect_by_number(numbered, {rank: len(s.numbered) for rank, s in snapshots.items()})
        if parts != OptimizerShards():
            return renamed, parts
        if len(lists) > 1 and len({*map(len, lists)}) == 1:
            shared = _share_names(snapshots, numbered)
            owned = _detect_by_owner(shared)
            # Without owners, the names of each rank remain, as in the comparison of a running job.
            return (snapshots, OptimizerShards()) if owned is None else (shared, owned)
    return snapshots, _detect_by_owner(snapshots) or OptimizerShards()


def _share_names(snapshots: Mapping[int, Snapshot], numbered: Mapping[int, Snapshot]) -> Mapping[int, Snapshot]:
    """Name the parameters of all ranks as on the rank with the most names.

    The shapes of few states may determine no names, or others. Replicas number their parameters in the same order.
    """
    lists = [snapshot.numbered for snapshot in snapshots.values()]
    best = max(lists, key=lambda names: sum(not name.isdecimal() for name in names))
    names = {str(i): name for i, name in enumerate(best)}
    return {rank: _rename_parameters(snapshot, names) for rank, snapshot in numbered.items()}


def _detect_by_owner(snapshots: Mapping[int, Snapshot]) -> OptimizerShards | None:
    owners = find_owners(snapshots)
    if owners is None:
        return None
    own = {rank: frozenset(parameters) for rank, parameters in owners.by_rank.items()}
    return OptimizerShards(own, owned=frozenset(owners.owned), lost=tuple(owners.lost))


def _rename_parameters(snapshot: Snapshot, names: Mapping[str, str]) -> Snapshot:
    """Rename the parameters of the optimizer. names: from old to new names."""
    full = {f"optimizer.{old}": f"optimizer.{new}" for old, new in names.items()}
    tensors = {}
    for name, tensor in snapshot.tensors.items():
        parameter, _, state = name.rpartition(".")
        new = f"{full[parameter]}.{state}" if parameter in full else name
        tensors[new] = tensor if new == name else replace(tensor, name=new)
    return replace(snapshot, tensors=tensors)


def _full_names(parameters: Sequence[str]) -> frozenset[str]:
    return frozenset(normalize(f"optimizer.{name}" for name in parameters).values())


def _detect_by_label(labels: Sequence[frozenset[str]], snapshots: Mapping[int, Snapshot]) -> OptimizerShards:
    """Detect folders of several nodes: disjoint parts, complete together."""
    if any(one & other for one, other in combinations(labels, 2)):
        return OptimizerShards()
    all_labels = frozenset[str]().union(*labels)
    worlds = {tuple(s.values.get(f"{name}_world_size") for name in ("dp", "mp")) for s in snapshots.values()}
    sizes = [size for size in worlds.pop() if isinstance(size, int)] if len(worlds) == 1 else []
    complete = len(sizes) == 2 and len(all_labels) == math.prod(sizes)
    return OptimizerShards(labels=all_labels, unclear=None if complete else Detail.INCOMPLETE_PARTITIONING())


def _detect_by_number(
    snapshots: Mapping[int, Snapshot], counts: Mapping[int, int]
) -> tuple[Mapping[int, Snapshot], OptimizerShards]:
    """Decide by shapes whether the ranks number different parameters of one model.

    counts: number of parameters by rank.
    """
    parameters = _list_parameters(next(iter(snapshots.values())))
    held = {rank: _find_shapes(snapshots[rank]) for rank, count in counts.items() if count}
    total, held_shapes = sum(counts.values()), Counter(shape for shapes in held.values() for shape in shapes.values())
    if total > len(parameters) or held_shapes - Counter(parameters.values()):
        return snapshots, OptimizerShards()
    conflict = any(
        one[i] != other[i] for one, other in combinations(held.values(), 2) for i in one.keys() & other.keys()
    )
    # Replicas have the same number of parameters.
    conflict = conflict or (total == len(parameters) and len({counts[rank] for rank in held}) > 1)
    # A rank without numbered parameters has no state, or the state of all parameters by name.
    whole = any(
        name.startswith("optimizer.") for rank, s in snapshots.items() if rank not in held for name in s.tensors
    )
    if whole or not conflict:
        unclear = whole or (total == len(parameters) and len(held) == len(counts) and all(held.values()))
        return snapshots, OptimizerShards(unclear=Detail.UNCLEAR_PARTITIONING() if unclear else None)
    owned = _repeat_partition(parameters, {rank: _list_groups(s, counts[rank]) for rank, s in snapshots.items()})
    names = {
        rank: {str(i): owned[rank][i] if owned else f"(rank {rank}).{i}" for i in range(count)}
        for rank, count in counts.items()
    }
    renamed = {rank: _rename_parameters(s, names[rank]) for rank, s in snapshots.items()}
    return renamed, OptimizerShards({rank: _full_names(tuple(new.values())) for rank, new in names.items()})


def _list_parameters(snapshot: Snapshot) -> dict[str, _Shape]:
    """Return the shapes of the model's parameters in their order. Tied parameters count once, as in an optimizer."""
    model = {name: t for name, t in snapshot.tensors.items() if not _STATE.fullmatch(name)}
    tied = {name for names in find_shared_tensors(model.values()) for name in names[1:]}
    kinds = classify_tensors({name: t.full_shape for name, t in model.items()}, None).by_name
    return {name: model[name].full_shape for name, kind in kinds.items() if kind == "parameter" and name not in tied}


def _list_groups(snapshot: Snapshot, count: int) -> list[list[_Shape | None]]:
    """List the shapes of numbered parameters by parameter group; None without a state."""
    shapes = _find_shapes(snapshot)
    listed = [shapes.get(i) for i in range(count)]
    groups: list[list[_Shape | None]] = []
    while isinstance(members := snapshot.values.get(f"optimizer.param_groups.{len(groups)}.(positions)"), str):
        size = len(members.split(",")) if members else 0
        groups.append(listed[:size])
        listed = listed[size:]
    return [*groups, listed] if listed else groups


def _repeat_partition(
    parameters: Mapping[str, _Shape], groups: Mapping[int, Sequence[Sequence[_Shape | None]]]
) -> dict[int, list[str]]:
    """Name the parameters of each rank by ZeroRedundancyOptimizer's partition; {} if the shapes differ from it.

    Each group's parameters, sorted by size, go to the rank with the fewest elements so far (`_partition_parameters` in
    torch/distributed/optim/zero_redundancy_optimizer.py). The sort is stable, so the order of the parameters alone
    determines which rank gets which of several parameters with equal shapes. The result counts only if it has the
    number of parameters and the shapes of every rank and group. A group has all parameters with the shapes of its
    states. groups: for each rank, the shapes of its parameters by group.
    """
    sizes = dict.fromkeys(sorted(groups), 0)
    names: dict[int, list[str]] = {rank: [] for rank in groups}
    if len({len(of_rank) for of_rank in groups.values()}) != 1:
        return {}
    for by_rank in zip(*(groups[rank] for rank in sizes), strict=True):
        shapes = {shape for held in by_rank for shape in held}
        own: dict[int, list[str]] = {rank: [] for rank in sizes}
        members = [name for name, shape in parameters.items() if shape in shapes or None in shapes]
        for name in sorted(members, key=lambda name: math.prod(parameters[name]), reverse=True):
            rank = min(sizes, key=sizes.__getitem__)
            own[rank].append(name)
            sizes[rank] += math.prod(parameters[name])
        for rank, held in zip(sizes, by_rank, strict=True):
            fit = [shape in (None, parameters[name]) for shape, name in zip(held, own[rank], strict=False)]
            if len(held) != len(own[rank]) or not all(fit):
                return {}
            names[rank] += own[rank]
    return names


def _find_shapes(snapshot: Snapshot) -> dict[int, _Shape]:
    """Return the shape of each numbered parameter: the shape of its states, except step counters."""
    shapes: dict[int, _Shape] = {}
    for name, tensor in snapshot.tensors.items():
        if (match := _STATE.fullmatch(name)) and (tensor.shape or match[2] != "step"):
            shapes[int(match[1])] = max(shapes.get(int(match[1]), ()), tensor.full_shape, key=math.prod)
    return shapes


def find_lost_state(parts: OptimizerShards, aligned: Mapping[str, Mapping[int, Tensor]]) -> Iterator[TensorDiff]:
    """Yield the missing state of ranks without state for their own parameters, if other ranks have state.

    No file contains the missing tensors. A single parameter without state is not reported, because it may never have
    had a gradient. If no rank has state, as with plain SGD, nothing is reported. aligned: tensors by name and rank.
    """
    states: dict[int, dict[str, str]] = {rank: {} for rank in parts.own}  # dtypes of states by name
    for name, tensors in aligned.items():
        parameter, _, state = name.rpartition(".")
        for rank, tensor in tensors.items():
            if parameter in parts.own.get(rank, ()):
                states[rank][state] = tensor.dtype
    dtypes = {state: dtype for of_rank in states.values() for state, dtype in of_rank.items()}
    for rank, parameters in parts.own.items():
        for parameter in sorted(parameters) if dtypes and not states[rank] else ():
            yield from _describe_lost(rank, parameter, dtypes, aligned)
    for lost in parts.lost:
        of_class = {state: dtype for state, dtype in dtypes.items() if state in lost.states}
        yield from _describe_lost(lost.rank, lost.parameter, of_class, aligned)


def _describe_lost(
    rank: int, parameter: str, dtypes: Mapping[str, str], aligned: Mapping[str, Mapping[int, Tensor]]
) -> Iterator[TensorDiff]:
    for state, dtype in dtypes.items():
        name, kind = f"{parameter}.{state}", "optimizer_step" if state == "step" else "optimizer"
        if name not in aligned:
            yield TensorDiff(
                name, kind, dtype, (), "not_compared", Reason.MISSING, Detail.OWN_PART_MISSING(rank=rank),
                replica_groups=((rank,),), minority=(rank,),
            )  # fmt: skip
