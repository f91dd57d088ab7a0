"""Find tied tensors: names sharing memory on some ranks only, and copies of one tensor in several pipeline stages.

torch.save and torch.load preserve shared memory. Other formats store separate bytes for each name, so ties are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.comparison.replica_groups import PIPELINE, coordinates_in
from syncheck.records import Tie

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping

    from syncheck.snapshots import Snapshot, Tensor

_FORMATS_WITH_TIES = ("torch-zip", "torch-legacy")


def broken_ties(snapshots: Mapping[int, Snapshot], names: Mapping[int, Mapping[str, str]]) -> tuple[Tie, ...]:
    """Return the ties present on some ranks only.

    names: by rank, from stored to normalized names. Ranks that lack a name do not count.
    """
    tied = {
        rank: {
            frozenset(names[rank][name] for name in same)
            for same in snapshot.ties or find_shared_tensors(snapshot.tensors.values())
        }
        for rank, snapshot in snapshots.items()
        if snapshot.format in _FORMATS_WITH_TIES
    }
    broken = []
    for tie in set[frozenset[str]]().union(*tied.values()):
        together = tuple(rank for rank, sets in tied.items() if tie in sets or any(tie < same for same in sets))
        if len(together) < len(tied) and any(tie <= set(names[rank].values()) for rank in tied if rank not in together):
            broken.append(Tie(tuple(sorted(tie)), together))
    return tuple(sorted(broken, key=lambda tie: tie.names))


def rename_copies(aligned: dict[str, dict[int, Tensor]], snapshots: Mapping[int, Snapshot]) -> frozenset[str]:
    """Give copies of a tensor, which the metadata lists, the name of that tensor. Return these names.

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


def find_shared_tensors(tensors: Collection[Tensor]) -> list[list[str]]:
    """Return lists of names with the same storage offset, dtype, shape and strides."""
    seen = set()
    shared = set()
    for tensor in tensors:  # offsets first, because most tensors have unique offsets
        offset = tensor.path, tensor.offset
        if tensor.data is not None or tensor.refused or not tensor.numel:
            continue
        if offset in seen:
            shared.add(offset)
        seen.add(offset)
    if not shared:
        return []
    tied: dict[Hashable, list[str]] = defaultdict(list)
    for tensor in tensors:
        if (tensor.path, tensor.offset) in shared and tensor.data is None and not tensor.refused and tensor.numel:
            tied[tensor.path, tensor.offset, tensor.dtype, tensor.shape, tensor.strides].append(tensor.name)
    return [names for names in tied.values() if len(names) > 1]
