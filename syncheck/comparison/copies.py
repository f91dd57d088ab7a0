"""Match copies of a tensor in several pipeline stages, such as an embedding tied to the last layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.comparison.replica_groups import PIPELINE, coordinates_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.snapshots import Snapshot, Tensor


def rename_copies(aligned: dict[str, dict[int, Tensor]], snapshots: Mapping[int, Snapshot]) -> frozenset[str]:
    """Give copies of a tensor, listed in the metadata, the name of the tensor. Return these names.

    aligned: tensors by name and rank; changed. States of the optimizer follow their parameters. Metadata is untrusted:
    tensors are renamed only if no pipeline stage has both names, and if all ranks list the same copies.
    """
    blocks = [s.metadata.tied if s.metadata is not None else {} for s in snapshots.values()]
    stages = {rank: coordinates_in(snapshot, PIPELINE) for rank, snapshot in snapshots.items()}
    tied = blocks[0] if all(block == blocks[0] for block in blocks) and all(stages.values()) else {}
    names = set()
    for name in [*aligned] if tied else ():
        container, dot, rest = name.partition(".") if name.startswith(("optimizer.", "ema.")) else ("", "", name)
        parameter, state_dot, state = rest.rpartition(".") if container == "optimizer" else (rest, "", "")
        new = f"{container}{dot}{tied.get(parameter, parameter)}{state_dot}{state}"
        others = {stages[rank] for rank in aligned.get(new, ())}
        if new != name and others and others.isdisjoint(stages[rank] for rank in aligned[name]):
            aligned[new] |= aligned.pop(name)
            names.add(new)
    return frozenset(names)
