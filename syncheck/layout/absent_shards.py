"""Find the shards that the files of a group describe and do not contain, beside shards that several files contain.

A mesh states how many shards a tensor has. If two files hold one shard, and no file holds another shard of the tensor,
equal bytes show only a part of the model in sync: a file is absent, or a file is a copy of another rank's file.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import replace
from itertools import islice, product
from typing import TYPE_CHECKING

from syncheck.frozen import record
from syncheck.layout.boxes import count_indices
from syncheck.layout.dtensors import find_coordinate, find_runs, is_sharded, split_coordinate
from syncheck.layout.replica_groups import exclude_dimensions, name_dimensions
from syncheck.messages import Undecided

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.messages import Message
    from syncheck.snapshots import Sharding, Tensor

    _Coordinate = tuple[int, ...]

# The shards of a message, and the counted absent shards.
_MOST_SHARDS = 4
_MOST_COUNTED = 1024


@record
class _Absence:
    """A tensor without some of its shards.

    name, tensors: of the tensor, by rank.
    shards: how many there are.
    coordinates: of the absent shards.
    """

    name: str
    tensors: Mapping[int, Tensor]
    shards: int
    coordinates: tuple[_Coordinate, ...]


def find_absent_shards(names: Iterable[str], alignment: Alignment) -> Message | None:
    """Return why the files do not show a whole model; None if no compared tensor lacks a shard.

    names: the compared tensors.
    """
    absences: list[_Absence] = []
    for name in names:
        tensors = alignment.tensors.get(name, {})
        sharded = {rank: tensor for rank, tensor in tensors.items() if is_sharded(tensor)}
        # A whole tensor holds all shards.
        if len(sharded) < len(tensors) or not sharded:
            continue
        # A tensor whose ranks hold different shards was not compared at all.
        if alignment.find_replica_groups(name, tensors).comparable:
            absences += _find_absences(name, sharded, alignment)

    if not absences:
        return None

    first = absences[0]
    coordinates = []
    for coordinate in first.coordinates:
        text = ", ".join(map(str, coordinate))
        coordinates.append(f"({text})")

    absence = Undecided.ABSENT_SHARDS(
        name=first.name,
        shards=first.shards,
        absent=tuple(coordinates[:_MOST_SHARDS]),
        count=len(coordinates),
        tensors=len({absence.name for absence in absences}),
    )
    copies = tuple(_describe_copies(first.tensors, alignment.positions.mesh_rank))
    if not copies:
        return absence

    return Undecided.COPIED_SHARDS(
        copies=copies,
        absence=absence,
    )


def _find_absences(name: str, tensors: Mapping[int, Tensor], alignment: Alignment) -> Iterator[_Absence]:
    """Yield the absent shards of each tensor with one name; stages and experts have tensors of their own."""
    ranks_of_tensor: dict[Hashable, list[int]] = defaultdict(list)
    for rank, tensor in tensors.items():
        sharding = tensor.sharding
        assert sharding is not None
        outer_coordinates = alignment.positions.sharded.get(rank, ())
        outer = exclude_dimensions(outer_coordinates, name_dimensions(sharding))
        ranks_of_tensor[outer, sharding.mesh, sharding.placements, sharding.shape].append(rank)

    for ranks in ranks_of_tensor.values():
        parts = {rank: tensors[rank] for rank in ranks}
        coordinates = _list_present(parts)
        # Shards at an unknown position may be any shard.
        if coordinates is None:
            continue

        first = parts[ranks[0]]
        assert first.sharding is not None
        sizes, _ = split_coordinate(first.sharding, first.sharding.mesh)
        absent = tuple(_list_absent(ranks[0], first, coordinates))
        if absent:
            yield _Absence(
                name,
                tensors=parts,
                shards=math.prod(sizes),
                coordinates=absent,
            )


def _list_present(tensors: Mapping[int, Tensor]) -> set[_Coordinate] | None:
    """Return the coordinates of shards in the dividing dimensions of their mesh; None if a coordinate is unknown."""
    coordinates: set[_Coordinate] = set()
    for rank, tensor in tensors.items():
        assert tensor.sharding is not None
        coordinate = find_coordinate(rank, tensor.sharding)
        if coordinate is None:
            return None
        dividing_coordinates, _ = split_coordinate(tensor.sharding, coordinate)
        coordinates.add(dividing_coordinates)

    return coordinates


def _list_absent(rank: int, tensor: Tensor, present: Collection[_Coordinate]) -> Iterator[_Coordinate]:
    """Yield the coordinates of shards with elements that no file holds. tensor: a shard of the tensor, on a rank."""
    sharding = tensor.sharding
    assert sharding is not None
    # A copied dimension has one coordinate for each shard.
    ranges = []
    for placement, size in zip(sharding.placements, sharding.mesh, strict=True):
        count = size
        if placement == "R":
            count = 1

        ranges.append(range(count))

    # An untrusted mesh may have any number of shards.
    for coordinate in islice(product(*ranges), len(present) + _MOST_COUNTED):
        dividing_coordinates, _ = split_coordinate(sharding, coordinate)
        if dividing_coordinates not in present and _has_elements(rank, tensor, sharding, coordinate):
            yield dividing_coordinates


def _has_elements(rank: int, tensor: Tensor, sharding: Sharding, coordinate: Sequence[int]) -> bool:
    """Whether a shard has elements: a short dimension ends before the last ranks. Unknown shards have elements."""
    other_sharding = replace(sharding, coordinate=tuple(coordinate))
    runs = find_runs(
        rank,
        tensor,
        other_sharding,
    )
    return runs is None or all(map(count_indices, runs))


def _describe_copies(tensors: Mapping[int, Tensor], mesh_ranks: Mapping[int, int]) -> Iterator[Message]:
    """Yield a statement for each file that holds the shard of another rank, which has a file of its own.

    mesh_ranks: the rank in the mesh of each rank.
    """
    # Files that are numbered in another way have no rank in common with the mesh.
    own_ranks = {rank for rank in tensors if mesh_ranks[rank] == rank}
    for rank, tensor in tensors.items():
        mesh_rank = mesh_ranks[rank]
        if rank not in own_ranks and mesh_rank in own_ranks:
            yield Undecided.SHARD_OF_RANK(
                file=os.path.basename(tensor.path),
                rank=mesh_rank,
            )
