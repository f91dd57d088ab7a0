"""Optimizer state that is partitioned over the ranks, as ZeRO does: whose part is which, and who has lost its own.

The metadata says so, or the files do:
- Each rank numbers its own parameters from 0 (ZeroRedundancyOptimizer, FairScale's OSS): under one number the ranks
  hold states of unequal shapes, and all together no more than the model's parameters.
- DeepSpeed's folders of several nodes hold the partitions of their own ranks, under labels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

from syncheck.kinds import kinds_of
from syncheck.messages import Detail
from syncheck.names import normalize
from syncheck.records import Reason, TensorDiff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.snapshots import Snapshot, Tensor

    Own = Mapping[int, frozenset[str]]
    Shapes = Mapping[int, Mapping[int, tuple[int, ...]]]

_STATE = re.compile(r"optimizer\.(\d+)\.([^.]+)")
_UNCLEAR = "nothing in the files says whether each rank holds its own part of the optimizer's state"


@dataclass(frozen=True, slots=True)
class Parts:
    """How optimizer state is partitioned.

    own: the parameters of each rank. labels: of parts that one replica alone holds. unclear: why states that differ
    may be parts, or may be out of sync.
    """

    own: Own = field(default_factory=dict)
    labels: frozenset[str] = frozenset()
    unclear: str = ""

    def holds(self, name: str, *, of_optimizer: bool) -> bool:
        """Whether a tensor is, or may be, a part that not every rank has."""
        if self.labels:
            return not self.labels.isdisjoint(name.split(".")[:2])
        return of_optimizer and bool(self.own or self.unclear)


def detect_partitioning(snapshots: Mapping[int, Snapshot]) -> tuple[Mapping[int, Snapshot], Parts]:
    """Detect how optimizer state is partitioned, and add the rank to parameters that each rank numbers from 0."""
    blocks = {
        rank: s.metadata for rank, s in snapshots.items() if s.metadata is not None and s.metadata.optimizer_sharded
    }
    if len(blocks) == len(snapshots):
        return snapshots, Parts({rank: _full(block.optimizer_parameters) for rank, block in blocks.items()})
    if any(snapshot.shards for snapshot in snapshots.values()):
        return snapshots, _by_label([snapshot.shards for snapshot in snapshots.values()], snapshots)
    lists = {snapshot.numbered for snapshot in snapshots.values()}
    names = [name for numbered in lists for name in numbered]
    if len(snapshots) > 1 and names and (len(lists) > 1 or names[0].isdecimal()):
        # Names from the shapes of one rank prove nothing if the ranks number different parameters.
        numbers = {rank: {name: str(i) for i, name in enumerate(s.numbered)} for rank, s in snapshots.items()}
        made, parts = _by_number(
            {rank: _renamed(s, numbers[rank]) for rank, s in snapshots.items()},
            {rank: len(s.numbered) for rank, s in snapshots.items()},
        )
        if parts != Parts():
            return made, parts
    return snapshots, Parts()


def _renamed(snapshot: Snapshot, names: Mapping[str, str]) -> Snapshot:
    """Rename the optimizer's parameters. names: old to new."""
    full = {f"optimizer.{old}": f"optimizer.{new}" for old, new in names.items()}
    tensors = {}
    for name, tensor in snapshot.tensors.items():
        parameter, _, state = name.rpartition(".")
        new = f"{full[parameter]}.{state}" if parameter in full else name
        tensors[new] = tensor if new == name else replace(tensor, name=new)
    return replace(snapshot, tensors=tensors)


def _full(parameters: Sequence[str]) -> frozenset[str]:
    return frozenset(normalize(f"optimizer.{name}" for name in parameters).values())


def _by_label(labels: Sequence[frozenset[str]], snapshots: Mapping[int, Snapshot]) -> Parts:
    """Folders that have no part in common, and together all parts, are those of several nodes."""
    if any(one & other for one, other in combinations(labels, 2)):
        return Parts()
    together = frozenset[str]().union(*labels)
    worlds = {tuple(s.values.get(f"{name}_world_size") for name in ("dp", "mp")) for s in snapshots.values()}
    sizes = [size for size in worlds.pop() if isinstance(size, int)] if len(worlds) == 1 else []
    known = len(sizes) == 2 and len(together) == math.prod(sizes)
    return Parts(labels=together, unclear="" if known else "the parts of the optimizer's state are not all there")


def _by_number(snapshots: Mapping[int, Snapshot], counts: Mapping[int, int]) -> tuple[Mapping[int, Snapshot], Parts]:
    """Decide by shapes whether the ranks number different parameters of one model.

    counts: numbered parameters by rank.
    """
    model = {name: t.shape for name, t in next(iter(snapshots.values())).tensors.items() if not _STATE.fullmatch(name)}
    parameters = [model[name] for name, kind in kinds_of(model, None).by_name.items() if kind == "parameter"]
    held = {rank: _shapes(snapshots[rank]) for rank, count in counts.items() if count}
    total, several = sum(counts.values()), Counter(shape for of in held.values() for shape in of.values())
    if total > len(parameters) or several - Counter(parameters):
        return snapshots, Parts()
    conflict = any(
        one[i] != other[i] for one, other in combinations(held.values(), 2) for i in one.keys() & other.keys()
    )
    # Replicas number equally many parameters.
    conflict = conflict or (total == len(parameters) and len({counts[rank] for rank in held}) > 1)
    # A rank that numbers no parameters has no state, or the state of all parameters by name.
    whole = any(
        name.startswith("optimizer.") for rank, s in snapshots.items() if rank not in held for name in s.tensors
    )
    if whole or not conflict:
        unclear = whole or (total == len(parameters) and len(held) == len(counts) and all(held.values()))
        return snapshots, Parts(unclear=_UNCLEAR if unclear else "")
    names = {rank: {str(i): f"(rank {rank}).{i}" for i in range(count)} for rank, count in counts.items()}
    made = {rank: _renamed(s, names[rank]) for rank, s in snapshots.items()}
    return made, Parts({rank: _full(tuple(of.values())) for rank, of in names.items()})


def _shapes(snapshot: Snapshot) -> dict[int, tuple[int, ...]]:
    """Return the shape of each numbered parameter; its states have it, besides counters."""
    found: dict[int, tuple[int, ...]] = {}
    for name, tensor in snapshot.tensors.items():
        if (match := _STATE.fullmatch(name)) and (tensor.shape or match[2] != "step"):
            found[int(match[1])] = max(found.get(int(match[1]), ()), tensor.shape, key=math.prod)
    return found


def find_lost_state(own: Own, found: Mapping[str, Mapping[int, Tensor]]) -> Iterator[TensorDiff]:
    """Give what a rank that has no state at all of its own parameters lacks, where other ranks have theirs.

    Nobody else has such tensors, so that they stand in no file. One parameter without state may never have had a
    gradient, and an optimizer such as plain SGD keeps none on any rank: neither is told. found: all tensors by name.
    """
    states: dict[int, dict[str, str]] = {rank: {} for rank in own}  # names of states, and their dtypes
    for name, tensors in found.items():
        parameter, _, state = name.rpartition(".")
        for rank, tensor in tensors.items():
            if parameter in own.get(rank, ()):
                states[rank][state] = tensor.dtype
    kept = {state: dtype for of_rank in states.values() for state, dtype in of_rank.items()}
    for rank, parameters in own.items():
        if kept and not states[rank]:
            yield from (
                TensorDiff(
                    f"{parameter}.{state}", "optimizer_step" if state == "step" else "optimizer", dtype, (),
                    "not_compared", Reason.MISSING, Detail.OWN_PART_MISSING(rank=rank), replica_groups=((rank,),),
                    minority=(rank,),
                )
                for parameter in sorted(parameters)
                for state, dtype in kept.items()
                if f"{parameter}.{state}" not in found
            )  # fmt: skip
