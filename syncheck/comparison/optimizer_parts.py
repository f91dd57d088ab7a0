"""Optimizer state that is dealt out to the ranks, as ZeRO does: whose part is which, and who has lost its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.names import normalize
from syncheck.records import TensorDiff

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncheck.snapshots import Snapshot, Tensor

    Own = Mapping[int, frozenset[str]]


def own_parameters(snapshots: Mapping[int, Snapshot]) -> Own:
    """Name the parameters whose optimizer state each rank says is its own; empty unless all ranks hold parts."""
    blocks = {
        rank: s.metadata for rank, s in snapshots.items() if s.metadata is not None and s.metadata.optimizer_sharded
    }
    if len(blocks) < len(snapshots):
        return {}
    return {
        rank: frozenset(normalize(f"optimizer.{name}" for name in block.optimizer_parameters).values())
        for rank, block in blocks.items()
    }


def lost_parts(own: Own, found: Mapping[str, Mapping[int, Tensor]]) -> Iterator[TensorDiff]:
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
                    "not_compared", "missing", f"not on rank {rank}, whose part it is", replica_groups=((rank,),),
                    minority=(rank,),
                )
                for parameter in sorted(parameters)
                for state, dtype in kept.items()
                if f"{parameter}.{state}" not in found
            )  # fmt: skip
