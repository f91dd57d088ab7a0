"""Align the tensors of ranks: which ranks must hold equal bytes of which tensor.

The comparison of replicas, `diff` (which joins the files of all ranks), the search for stale ranks and the check of a
running job need the same answer, so they cannot disagree. An `Alignment` has, for the snapshots of one model:

- Names: each tensor has one name on all ranks, without the prefixes of wrappers. If each rank numbers its own
  parameters of an optimizer from 0, the parameters have names.
- Copies: a copy of a tensor in another pipeline stage has the name of the tensor.
- Positions: the mesh coordinates of each rank, from which follow the boxes that it holds.
- Replicated tensors: whole on all tensor-parallel ranks, although their files do not record it.
- Replica groups: for each tensor, the ranks whose bytes must be equal, and the ranks required to hold it.

Four questions sound alike and are not answered here:

- Which files are replicas of one model and step (`grouping`).
- Which names share memory within one file (`copies.broken_ties`), which a file shows without other ranks.
- Which tensors of a Megatron folder are whole (`megatron`): its files are placed in a mesh before they are aligned.
- Which ranks did hold equal bytes: the result of a comparison. Rules and histories read it from `TensorDiff`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.frozen import record
from syncheck.layout.copies import find_copies, find_second_copies, is_embedding_in_stages
from syncheck.layout.optimizer_shards import OptimizerShards, detect_partitioning
from syncheck.layout.replica_groups import Positions, find_positions, find_replica_groups
from syncheck.layout.replicated_names import find_replicated
from syncheck.tensors.names import normalize_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.layout.replica_groups import ReplicaGroups
    from syncheck.snapshots import Snapshot, Tensor


@record
class Alignment:
    """The tensors of the ranks of one model by common names, and the ranks that must hold equal bytes of each."""

    snapshots: Mapping[int, Snapshot]
    """By rank, with names for numbered parameters of the optimizer."""
    names: Mapping[int, Mapping[str, str]]
    """By rank, from the names in its snapshot to names without the prefixes of wrappers."""
    tensors: Mapping[str, Mapping[int, Tensor]]
    """By common name and rank, in the order of the first rank."""
    copies: Mapping[str, str]
    """The name of the tensor by the name of its copy in another pipeline stage."""
    second_copies: Mapping[str, str]
    """The name of the tensor by the name of a second copy in one stage. A second copy keeps its name, and must equal
    the tensor in the other stages."""
    separate_copies: Mapping[str, Mapping[int, Tensor]]
    """The copies by their own names and by rank, without the tensor in other stages."""
    tied: frozenset[str]
    """Names of tensors with copies in several stages."""
    positions: Positions
    replicated: frozenset[str]
    """Names of tensors that all tensor-parallel ranks hold whole."""
    optimizer: OptimizerShards
    """How the state of the optimizer is partitioned over the ranks."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the model."""
        return tuple(self.snapshots)

    def find_replica_groups(self, name: str, tensors: Mapping[int, Tensor]) -> ReplicaGroups:
        """Return the replica groups of a tensor.

        name: its common name.
        tensors: by rank; they may be assembled from shards.
        """
        return find_replica_groups(
            tensors,
            self.ranks,
            self.positions,
            replicated=name in self.replicated,
            tied=name in self.tied,
        )

    def find_source(self, name: str) -> str:
        """Return the name of the tensor whose bytes a tensor has: another one for copies, else its own name."""
        common_name = self.copies.get(name, name)
        return self.second_copies.get(common_name, common_name)


def align(snapshots: Mapping[int, Snapshot]) -> Alignment:
    """Align the tensors of the ranks of one model.

    snapshots: by rank, in the order of the ranks.
    """
    snapshots, optimizer = detect_partitioning(snapshots)
    names = normalize_ranks({rank: snapshot.tensors for rank, snapshot in snapshots.items()})
    tensors: dict[str, dict[int, Tensor]] = {}
    for rank, snapshot in snapshots.items():
        names_of_rank = names[rank]
        for stored_name, tensor in snapshot.tensors.items():
            tensors.setdefault(names_of_rank[stored_name], {})[rank] = tensor

    # The first copy in another stage takes the name of its tensor, so that both are compared.
    copies = find_copies(tensors, snapshots)
    separate_copies: dict[str, dict[int, Tensor]] = {}
    for name, source in copies.items():
        separate_copies[name] = tensors.pop(name)
        tensors[source] = tensors[source] | separate_copies[name]

    second_copies = find_second_copies(tensors, copies, snapshots)
    tied = {*copies.values(), *second_copies}
    for name, source in second_copies.items():
        # The copy of this stage must equal the tensor of other stages, but not the first copy beside it.
        for rank, tensor in tensors[source].items():
            tensors[name].setdefault(rank, tensor)

    # Libraries without metadata give an embedding one name in all stages.
    for name, by_rank in tensors.items():
        if is_embedding_in_stages(name, by_rank, snapshots):
            tied.add(name)

    positions = find_positions(snapshots)
    # Outside a mesh, all ranks hold whole tensors.
    replicated: frozenset[str] = frozenset()
    if positions.plain:
        replicated = find_replicated((*tensors, *separate_copies))

    return Alignment(
        snapshots=snapshots,
        names=names,
        tensors=tensors,
        copies=copies,
        second_copies=second_copies,
        separate_copies=separate_copies,
        tied=frozenset(tied),
        positions=positions,
        replicated=replicated,
        optimizer=optimizer,
    )
