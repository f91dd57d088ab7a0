"""Match copies of a tensor in several pipeline stages, such as an embedding tied to the last layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.comparison.replica_groups import PIPELINE, coordinates_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.snapshots import Snapshot, Tensor


def find_copies(names: Mapping[str, Iterable[int]], snapshots: Mapping[int, Snapshot]) -> dict[str, str]:
    """Return the name of the tensor by the name of each copy of it that the metadata lists.

    names: normalized names, with the ranks that have them. States of the optimizer follow their parameters. Metadata is
    untrusted: a name counts as a copy only if no pipeline stage has both names, and if all ranks list the same copies.
    """
    blocks = [s.metadata.tied if s.metadata is not None else {} for s in snapshots.values()]
    stages = {rank: coordinates_in(snapshot, PIPELINE) for rank, snapshot in snapshots.items()}
    tied = blocks[0] if all(block == blocks[0] for block in blocks) and all(stages.values()) else {}
    held = {name: {stages[rank] for rank in ranks} for name, ranks in names.items()} if tied else {}
    copies: dict[str, str] = {}
    for name in [*held]:
        new = name_of_copied(name, tied)
        if new != name and held.get(new) and name not in copies.values() and held[new].isdisjoint(held[name]):
            held[new] |= held.pop(name)
            copies[name] = new
    return copies


def name_of_copied(name: str, tied: Mapping[str, str]) -> str:
    """Return the name of the tensor of which `name` is a copy, else `name`. tied: from the metadata."""
    container, dot, rest = name.partition(".") if name.startswith(("optimizer.", "ema.")) else ("", "", name)
    parameter, state_dot, state = rest.rpartition(".") if container == "optimizer" else (rest, "", "")
    return f"{container}{dot}{tied.get(parameter, parameter)}{state_dot}{state}"


def rename_copies(aligned: dict[str, dict[int, Tensor]], snapshots: Mapping[int, Snapshot]) -> frozenset[str]:
    """Give copies of a tensor the name of the tensor, and return these names. aligned: by name and rank; changed."""
    copies = find_copies(aligned, snapshots)
    for name, new in copies.items():
        aligned[new] |= aligned.pop(name)
    return frozenset(copies.values())
