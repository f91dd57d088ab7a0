"""Determine the replica groups of a tensor: the sets of ranks whose bytes must be equal.

- Plain tensor: all ranks. In a tensor, pipeline or expert parallel mesh, the ranks with equal mesh coordinates: files
  do not show whether a plain tensor in this mesh is replicated or a part. Tensors whose name and shape exclude
  partitioning by tensor parallelism are also compared along the tensor-parallel dimension (`replicated_names`).
- DTensor that every rank of its mesh holds whole: as a plain tensor, and along the dimensions of its mesh.
- DTensor: the ranks with equal coordinates in all dividing dimensions, into shards or into partial sums. HSDP is
  therefore compared along the replicate dimension, and FSDP shards have no replicas. A mesh may contain only some of
  the ranks (tensor parallelism inside DDP): ranks with equal coordinates in sibling meshes are replicas, unless they
  belong to different pipeline stages.
- Copies of a tensor in several pipeline stages, if the metadata lists them: also the ranks of these stages.
- If some ranks hold shards of a tensor and other ranks the whole tensor, the shards of each mesh are assembled.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import field
from typing import TYPE_CHECKING

from syncheck.frozen import record
from syncheck.layout.dtensors import (
    find_coordinate,
    find_mesh_rank,
    is_sharded,
    is_whole,
    layout_text,
    split_coordinate,
)
from syncheck.text import ranks_text

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from syncheck.snapshots import Sharding, Snapshot, Tensor

    _Coordinates = tuple[tuple[str, int], ...]
    Coordinates = Mapping[int, _Coordinates]

# Names of the tensor-parallel mesh dimension. `mp` is excluded: it may be the pipeline's dimension.
TENSOR_PARALLEL = frozenset({"tp", "tensor", "tensor_parallel"})
# Names of mesh dimensions along which ranks hold different parameters, in libraries and their examples. Along dp,
# replicate, shard, fsdp and cp (context), all ranks have the same plain tensors.
MODEL_PARALLEL = frozenset(
    "tp tensor tensor_parallel model model_parallel mp pp pipe pipeline pipeline_parallel pipeline_stage stage ep "
    "expert expert_parallel etp".split()
)
# The dimensions without DTensors: torch shards parameters along tp and ep as DTensors, but not along pp.
PIPELINE = frozenset("pp pipe pipeline pipeline_parallel pipeline_stage stage".split())
# Along these dimensions, ranks hold parameters with other names: other layers, or other experts.
DIFFERENT_PARAMETERS = PIPELINE | frozenset("ep expert expert_parallel".split())
Sets = tuple[tuple[int, ...], ...]


@record
class Positions:
    """The mesh coordinates of the ranks of a group.

    plain: in the dimensions that divide plain tensors; empty if no rank has such a coordinate.
    sharded: in the dimensions that divide DTensors besides their own mesh; empty if no rank has such a coordinate.
    mesh_rank: the rank in the mesh of each rank; they differ if files are renamed or numbered by position.
    stages: a pipeline stage for each rank with DTensors; ranks of the same stage have most names in common.
    """

    plain: Coordinates = field(default_factory=dict)
    sharded: Coordinates = field(default_factory=dict)
    mesh_rank: Mapping[int, int] = field(default_factory=dict)
    stages: Mapping[int, int] = field(default_factory=dict)

    def find_stage(self, rank: int) -> tuple[int | None, _Coordinates | None]:
        """Return what the ranks with equal DTensors have in common: the stage, and the coordinates outside meshes."""
        return self.stages.get(rank), self.sharded.get(rank)


@record
class ReplicaGroups:
    """The replica groups of a tensor.

    sets: ranks with the tensor whose bytes must be equal.
    expected: ranks required to have the tensor.
    kind: `DTensor`, `model parallel`, or empty for a plain tensor of all ranks.
    layout: description of the sharding.
    """

    sets: Sets
    expected: tuple[int, ...]
    kind: str = ""
    layout: str = ""

    @property
    def comparable(self) -> Sets:
        """The sets of at least two ranks."""
        return tuple(ranks for ranks in self.sets if len(ranks) > 1)

    @property
    def has_only_shards(self) -> bool:
        """Whether each rank holds a shard of its own, so that there is nothing to compare."""
        return bool(self.kind) and not self.comparable


def find_positions(snapshots: Mapping[int, Snapshot]) -> Positions:
    """Return the mesh coordinates of each rank from the file name, else the metadata, else the DTensors."""
    plain: dict[int, _Coordinates] = {}
    mesh_rank: dict[int, int] = {}
    has_tensor_parallel_mesh = False
    for rank, snapshot in snapshots.items():
        plain[rank] = _find_dividing_coordinates(snapshot)
        mesh_rank[rank] = rank
        for sharding in reversed(_list_shardings(snapshot)):
            # The first layout with a coordinate counts.
            if sharding.coordinate:
                mesh_rank[rank] = find_mesh_rank(sharding)

            if name_dimensions(sharding) & TENSOR_PARALLEL:
                has_tensor_parallel_mesh = True

    # Without any coordinate, the ranks are in no mesh.
    if not any(plain.values()):
        plain = {}

    sharded = plain
    if has_tensor_parallel_mesh:
        sharded = _reduce(plain, TENSOR_PARALLEL)
        if not any(sharded.values()):
            sharded = {}

    return Positions(
        plain=plain,
        sharded=sharded,
        mesh_rank=mesh_rank,
        stages=_number_stages(snapshots),
    )


def _find_dividing_coordinates(snapshot: Snapshot) -> _Coordinates:
    """Return the coordinates of a rank in the dimensions along which plain tensors may differ."""
    # The meshes of DTensors divide plain tensors along pipelines only.
    dimensions = MODEL_PARALLEL if _get_recorded_mesh(snapshot) else PIPELINE
    return tuple(sorted(coordinates_in(snapshot, dimensions)))


def _list_shardings(snapshot: Snapshot) -> list[Sharding]:
    """Return the distinct layouts of the DTensors of a rank."""
    return _list_distinct(tensor.sharding for tensor in snapshot.tensors.values())


def _list_distinct(shardings: Iterable[Sharding | None]) -> list[Sharding]:
    """Return the distinct layouts. Ranks and tensors share objects, so a thousand ranks have only a few of them."""
    by_object = {id(sharding): sharding for sharding in shardings if sharding is not None}
    return [*by_object.values()]


def name_dimensions(sharding: Sharding | None) -> frozenset[str]:
    """Return the names of the dimensions of a mesh in lower case."""
    if sharding is None:
        return frozenset()

    return frozenset(name.lower() for name in sharding.names)


def _reduce(coordinates: Coordinates, dimensions: frozenset[str]) -> dict[int, _Coordinates]:
    """Return the coordinates of each rank without some dimensions. dimensions: in lower case."""
    return {rank: exclude_dimensions(of_rank, dimensions) for rank, of_rank in coordinates.items()}


def exclude_dimensions(coordinates: _Coordinates, dimensions: frozenset[str]) -> _Coordinates:
    """Return the coordinates in all other dimensions. dimensions: in lower case."""
    return tuple(pair for pair in coordinates if pair[0].lower() not in dimensions)


def _number_stages(snapshots: Mapping[int, Snapshot]) -> dict[int, int]:
    """Number pipeline stages by the names of DTensors: ranks of a stage have most names in common."""
    names_by_rank: dict[int, frozenset[str]] = {}
    for rank, snapshot in snapshots.items():
        names = frozenset(name for name, tensor in snapshot.tensors.items() if tensor.sharding is not None)
        if names:
            names_by_rank[rank] = names

    numbers: dict[frozenset[str], int] = {}
    for names in sorted(set(names_by_rank.values()), key=len, reverse=True):
        numbers[names] = _find_stage(names, numbers)

    return {rank: numbers[names] for rank, names in names_by_rank.items()}


def _find_stage(names: frozenset[str], numbers: Mapping[frozenset[str], int]) -> int:
    """Return the number of the stage with most of the names, or else the next number.

    numbers: of the known stages, by their names.
    """
    for stage_names, number in numbers.items():
        common_names = names & stage_names
        if 2 * len(common_names) > len(names):
            return number

    return len(numbers)


def mesh_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the mesh coordinate of a rank by dimension, from the file name, else the metadata, else the DTensors."""
    recorded_mesh = _get_recorded_mesh(snapshot)
    if recorded_mesh:
        return dict(recorded_mesh)

    meshes: list[dict[str, int]] = []
    for sharding in _list_shardings(snapshot):
        has_coordinates = 0 < len(sharding.names) == len(sharding.coordinate)
        if has_coordinates:
            named_coordinates = zip(sharding.names, sharding.coordinate, strict=True)
            meshes.append(dict(sharding.beside) | dict(named_coordinates))

    return max(meshes, key=len, default={})


def _get_recorded_mesh(snapshot: Snapshot) -> Mapping[str, int]:
    """Return the mesh coordinate of a rank from the file name, else the metadata; empty without both."""
    if snapshot.mesh or snapshot.metadata is None:
        return snapshot.mesh

    return snapshot.metadata.mesh


def coordinates_in(snapshot: Snapshot, dimensions: frozenset[str]) -> frozenset[tuple[str, int]]:
    """Return the coordinates of a rank in some dimensions; empty if its mesh has none of them."""
    return frozenset(pair for pair in mesh_of(snapshot).items() if pair[0].lower() in dimensions)


def find_replica_groups(
    tensors: Mapping[int, Tensor],
    ranks: tuple[int, ...],
    positions: Positions,
    *,
    replicated: bool = False,
    tied: bool = False,
) -> ReplicaGroups:
    """Divide the ranks with a tensor into replica groups.

    ranks: all ranks of the group.
    replicated: whether the name shows that all tensor-parallel ranks hold the whole tensor; different shapes override
    it.
    tied: whether pipeline stages hold copies of the tensor.
    """
    shardings: dict[int, Sharding] = {}
    for rank, tensor in tensors.items():
        sharding = tensor.sharding
        if sharding is not None and not is_whole(sharding):
            shardings[rank] = sharding

    if shardings:
        return _find_sets_of_dtensor(
            shardings,
            present=tuple(tensors),
            ranks=ranks,
            positions=positions,
            tied=tied,
        )

    if not positions.plain:
        return ReplicaGroups((tuple(tensors),), ranks)

    return _find_sets_of_plain_tensor(
        tensors,
        ranks,
        positions,
        replicated=replicated,
        tied=tied,
    )


def _find_sets_of_plain_tensor(
    tensors: Mapping[int, Tensor], ranks: tuple[int, ...], positions: Positions, *, replicated: bool, tied: bool
) -> ReplicaGroups:
    """Return the replica groups of a plain tensor in a mesh. Parameters as in `find_replica_groups`."""
    copied_dimensions = _find_copied_dimensions(tensors)
    # A rank is required to have the tensor if a rank with its coordinates has it.
    coordinates = _reduce(positions.plain, copied_dimensions)
    coordinates_with_tensor = {coordinates[rank] for rank in tensors}
    expected = tuple(rank for rank in ranks if coordinates[rank] in coordinates_with_tensor)
    # Different shapes prove that ranks hold parts, whatever the name suggests.
    shapes = {tensor.shape for tensor in tensors.values()}
    if replicated and len(shapes) == 1:
        copied_dimensions |= TENSOR_PARALLEL

    if tied:
        copied_dimensions |= PIPELINE

    coordinates = _reduce(positions.plain, copied_dimensions)
    sets = _divide(tensors, coordinates)
    dimensions: dict[str, int] = {}
    for coordinates_of_rank in coordinates.values():
        dimensions |= coordinates_of_rank

    if not dimensions:
        return ReplicaGroups(sets, expected)

    return ReplicaGroups(
        sets=sets,
        expected=expected,
        kind="model parallel",
        layout=f"parts along {', '.join(dimensions)}",
    )


def _divide(ranks: Iterable[int], keys: Mapping[int, Hashable]) -> Sets:
    """Return the sets of ranks with equal keys. keys: by rank."""
    ranks_by_key: dict[Hashable, list[int]] = defaultdict(list)
    for rank in ranks:
        ranks_by_key[keys[rank]].append(rank)

    return tuple(map(tuple, ranks_by_key.values()))


def _find_copied_dimensions(tensors: Mapping[int, Tensor]) -> frozenset[str]:
    """Return the dimensions of the meshes of whole DTensors, in lower case, along which all ranks hold copies."""
    dimensions: list[frozenset[str]] = []
    for tensor in tensors.values():
        dimensions.append(name_dimensions(tensor.sharding))

    copied = frozenset.intersection(*dimensions)
    # All names of the dimension mean the same.
    if copied & TENSOR_PARALLEL:
        copied |= TENSOR_PARALLEL

    return copied


def _find_sets_of_dtensor(
    shardings: Mapping[int, Sharding],
    present: tuple[int, ...],
    ranks: tuple[int, ...],
    positions: Positions,
    *,
    tied: bool,
) -> ReplicaGroups:
    """Return the replica groups of a DTensor.

    shardings: by rank, of the ranks with a shard.
    present: the ranks with the tensor, some of which may hold it whole.
    """
    copied_dimensions = PIPELINE if tied else frozenset[str]()
    # A tensor is a replica of no other rank's tensor if the position of its box is unknown.
    keys: dict[int, Hashable] = dict(zip(present, present, strict=True))
    for rank, sharding in shardings.items():
        box = _identify_box(rank, sharding)
        if box is None:
            continue

        outer = tuple(pair for pair in positions.sharded.get(rank, ()) if pair[0] not in sharding.names)
        keys[rank] = (box, exclude_dimensions(outer, copied_dimensions))

    expected = _find_expected_shards(
        shardings,
        present=present,
        ranks=ranks,
        positions=positions,
    )
    return ReplicaGroups(
        sets=_divide(present, keys),
        expected=expected,
        kind="DTensor",
        layout=_describe_layout(shardings, present),
    )


def _identify_box(rank: int, sharding: Sharding) -> Hashable | None:
    """Return a key that two ranks have in common if they hold the same box; None if the position is unknown."""
    coordinate = find_coordinate(rank, sharding)
    if coordinate is None:
        return None

    dividing_coordinates, _ = split_coordinate(sharding, coordinate)
    return sharding.mesh, sharding.names, sharding.placements, sharding.shape, dividing_coordinates


def _find_expected_shards(
    shardings: Mapping[int, Sharding], present: tuple[int, ...], ranks: tuple[int, ...], positions: Positions
) -> tuple[int, ...]:
    """Return the ranks required to have a DTensor: those of its meshes, and of the stages that have it."""
    mesh_ranks: set[int] = set()
    for sharding in _list_distinct(shardings.values()):
        mesh_ranks.update(sharding.ranks)

    stages = {positions.find_stage(rank) for rank in present if rank in positions.stages}
    expected = []
    for rank in ranks:
        is_in_mesh = positions.mesh_rank.get(rank, rank) in mesh_ranks
        is_in_stage = positions.find_stage(rank) in stages
        if is_in_mesh or is_in_stage or rank in present:
            expected.append(rank)

    return tuple(expected)


def _describe_layout(shardings: Mapping[int, Sharding], present: Iterable[int]) -> str:
    """Describe the layout of a DTensor, and which ranks hold it whole. present: the ranks with the tensor."""
    texts = {layout_text(sharding) for sharding in _list_distinct(shardings.values())}
    layout = "in different layouts"
    if len(texts) == 1:
        (layout,) = texts

    ranks_with_whole = [rank for rank in present if rank not in shardings]
    if ranks_with_whole:
        layout += f", but whole on {ranks_text(ranks_with_whole)}"

    return layout


def is_mixed(tensors: Mapping[int, Tensor]) -> bool:
    """Whether some ranks hold a shard and other ranks the whole tensor."""
    sharded = sum(map(is_sharded, tensors.values()))
    return 0 < sharded < len(tensors)
