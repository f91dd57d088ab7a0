"""Determine the replica groups of a tensor: the sets of ranks whose bytes must be equal.

- Plain tensor: all ranks. In a tensor, pipeline or expert parallel mesh, the ranks with equal mesh coordinates: files
  do not show whether a plain tensor in this mesh is replicated or a part. Tensors whose name and shape exclude
  partitioning by tensor parallelism are also compared along the tensor-parallel dimension.
- DTensor that every rank of its mesh holds whole: as a plain tensor, and along the dimensions of its mesh.
- DTensor: the ranks with equal coordinates in all dividing dimensions, into shards or into partial sums. HSDP is
  therefore compared along the replicate dimension, and FSDP shards have no replicas. A mesh may contain only some of
  the ranks (tensor parallelism inside DDP): ranks with equal coordinates in sibling meshes are replicas, unless they
  belong to different pipeline stages.
- Copies of a tensor in several pipeline stages, if the metadata lists them: also the ranks of these stages.
- If some ranks hold shards of a tensor and other ranks the whole tensor, the shards of each mesh are assembled.

A file does not record whether a plain tensor is a shard or a replica in a tensor-parallel mesh, and to compare shards
as replicas would be a false alarm. Only names used by Megatron, transformers and torchtitan for replicated tensors are
accepted: norms over the hidden size, routers, biases that row-parallel layers add after their reduction, and step
counters of the optimizer. Norms of queries and keys and norms within a layer (state-space mixers, experts, attention,
MLP) are excluded because some models shard them, and biases of column-parallel layers because they are sharded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.layout.dtensors import find_coordinate, find_mesh_rank, is_whole, layout_text
from syncheck.text import group_ranks, ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Mapping

    from syncheck.snapshots import Sharding, Snapshot, Tensor

    _Coordinates = tuple[tuple[str, int], ...]
    Coordinates = Mapping[int, _Coordinates]

# Names of the tensor-parallel mesh dimension. `mp` is excluded: it may be the pipeline's dimension.
TENSOR_PARALLEL = frozenset({"tp", "tensor", "tensor_parallel"})
_PLACE = "input|post|pre|final|self|cross|attn|attention|mlp|ffn|feed_?forward|word|embeddings?|embed|layer|rms"
_NORM = re.compile(
    rf"(?:(?:{_PLACE})_?)*(?:layer_?norm|rms_?norm|norm)(?:_?(?:f|final|\d))?|ln(?:_?(?:\d|f|final|attn|mlp))?|norm\d"
)
_NORM_LEAVES = frozenset({"weight", "bias"})
# TransformerEngine stores a norm in the linear layer after it.
_FUSED = frozenset({"layer_norm_weight", "layer_norm_bias"})
_ROUTER_LEAVES = frozenset({"weight", "bias", "expert_bias", "e_score_correction_bias"})
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "linear_proj", "linear_fc2", "dense_4h_to_h"})
_ATTENTION = frozenset({"self_attention", "attention", "inter_attention"})
# Name segments of modules whose layers may be sharded in another way.
_DIVIDED = re.compile(r"expert|mixer|mamba|ssm|rwkv|retention|linear_attn|delta_net|lora|adapter")
# Modules whose norms are over an inner dimension.
_INNER = re.compile(r".*(?:attn|attention|mlp|ffn|feed_?forward)")


# Names of mesh dimensions along which ranks hold different parameters, in libraries and their examples. Along dp,
# replicate, shard, fsdp and cp (context), all ranks have the same plain tensors.
MODEL_PARALLEL = frozenset(
    "tp tensor tensor_parallel model model_parallel mp pp pipe pipeline pipeline_parallel stage ep expert "
    "expert_parallel etp".split()
)
# The dimensions without DTensors: torch shards parameters along tp and ep as DTensors, but not along pp.
PIPELINE = frozenset("pp pipe pipeline pipeline_parallel stage".split())
# Along these dimensions, ranks hold parameters with other names: other layers, or other experts.
DIFFERENT_PARAMETERS = PIPELINE | frozenset("ep expert expert_parallel".split())
Sets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Positions:
    """The mesh coordinates of the ranks of a group.

    plain: in the dimensions that divide plain tensors. sharded: in the dimensions that divide DTensors besides their
    own mesh. Both are empty if no rank has a matching coordinate. mesh_rank: the rank in the mesh of each
    rank; they differ if files are renamed or numbered by position. stages: a pipeline stage for each rank with
    DTensors; ranks of the same stage have most names in common.
    """

    plain: Coordinates = field(default_factory=dict)
    sharded: Coordinates = field(default_factory=dict)
    mesh_rank: Mapping[int, int] = field(default_factory=dict)
    stages: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaSets:
    """The replica groups of a tensor.

    sets: ranks with the tensor whose bytes must be equal. expected: ranks required to have the tensor. kind: `DTensor`,
    `model parallel`, or empty for a plain tensor of all ranks. layout: description of the sharding.
    """

    sets: Sets
    expected: tuple[int, ...]
    kind: str = ""
    layout: str = ""

    @property
    def comparable(self) -> Sets:
        """The sets of at least two ranks."""
        return tuple(ranks for ranks in self.sets if len(ranks) > 1)


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

            if not TENSOR_PARALLEL.isdisjoint(name.lower() for name in sharding.names):
                has_tensor_parallel_mesh = True

    sharded = plain
    if has_tensor_parallel_mesh:
        sharded = {rank: _without(coordinates, TENSOR_PARALLEL) for rank, coordinates in plain.items()}

    return Positions(
        plain if any(plain.values()) else {},
        sharded if any(sharded.values()) else {},
        mesh_rank,
        _number_stages(snapshots),
    )


def _find_dividing_coordinates(snapshot: Snapshot) -> _Coordinates:
    """Return the coordinates of a rank in the dimensions along which plain tensors may differ."""
    mesh = snapshot.mesh
    if not mesh and snapshot.metadata is not None:
        mesh = snapshot.metadata.mesh

    dimensions = MODEL_PARALLEL
    if not mesh:
        # The meshes of DTensors divide plain tensors along pipelines only.
        mesh = mesh_of(snapshot)
        dimensions = PIPELINE

    return tuple(sorted(pair for pair in mesh.items() if pair[0].lower() in dimensions))


def _list_shardings(snapshot: Snapshot) -> list[Sharding]:
    """Return the distinct layouts of the DTensors of a rank. Tensors share layouts."""
    shardings = {id(tensor.sharding): tensor.sharding for tensor in snapshot.tensors.values()}
    return [sharding for sharding in shardings.values() if sharding is not None]


def _without(coordinates: _Coordinates, dimensions: frozenset[str]) -> _Coordinates:
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
        number = len(numbers)
        for stage_names, stage in numbers.items():
            if 2 * len(names & stage_names) > len(names):
                number = stage
                break

        numbers[names] = number

    return {rank: numbers[names] for rank, names in names_by_rank.items()}


def mesh_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the mesh coordinate of a rank by dimension, from the file name, else the metadata, else the DTensors."""
    if snapshot.mesh:
        return dict(snapshot.mesh)

    if snapshot.metadata is not None and snapshot.metadata.mesh:
        return dict(snapshot.metadata.mesh)

    largest_mesh: dict[str, int] = {}
    for sharding in _list_shardings(snapshot):
        if not sharding.names or len(sharding.names) != len(sharding.coordinate):
            continue

        mesh = dict(sharding.beside)
        mesh |= zip(sharding.names, sharding.coordinate, strict=True)
        if len(mesh) > len(largest_mesh):
            largest_mesh = mesh

    return largest_mesh


def coordinates_in(snapshot: Snapshot, dimensions: frozenset[str]) -> frozenset[tuple[str, int]]:
    """Return the coordinates of a rank in some dimensions; empty if its mesh has none of them."""
    return frozenset(at for at in mesh_of(snapshot).items() if at[0].lower() in dimensions)


def find_replica_sets(
    tensors: Mapping[int, Tensor],
    ranks: tuple[int, ...],
    positions: Positions,
    *,
    replicated: bool = False,
    tied: bool = False,
) -> ReplicaSets:
    """Divide the ranks with a tensor into replica groups.

    ranks: all ranks of the group. replicated: whether the name shows that all tensor-parallel ranks hold the whole
    tensor; different shapes override it. tied: whether pipeline stages hold copies of the tensor.
    """
    shardings: dict[int, Sharding] = {}
    for rank, tensor in tensors.items():
        if tensor.sharding is not None and not is_whole(tensor.sharding):
            shardings[rank] = tensor.sharding

    if shardings:
        return _find_sets_of_dtensor(shardings, tuple(tensors), ranks, positions, tied=tied)

    if not positions.plain:
        return ReplicaSets((tuple(tensors),), ranks)

    return _find_sets_of_plain_tensor(tensors, ranks, positions, replicated=replicated, tied=tied)


def _find_sets_of_plain_tensor(
    tensors: Mapping[int, Tensor], ranks: tuple[int, ...], positions: Positions, *, replicated: bool, tied: bool
) -> ReplicaSets:
    """Return the replica sets of a plain tensor in a mesh. Parameters as in `find_replica_sets`."""
    copied_dimensions = _find_copied_dimensions(tensors)
    expected = _find_expected(tensors, ranks, positions.plain, copied_dimensions)
    same_shape = len({tensor.shape for tensor in tensors.values()}) == 1
    if replicated and same_shape:
        copied_dimensions |= TENSOR_PARALLEL

    if tied:
        copied_dimensions |= PIPELINE

    coordinates = {rank: _without(positions.plain[rank], copied_dimensions) for rank in tensors}
    sets = tuple(tuple(members) for members in group_ranks(coordinates).values())
    dimensions: dict[str, None] = {}
    for rank in positions.plain:
        dimensions |= dict.fromkeys(name for name, _ in _without(positions.plain[rank], copied_dimensions))

    if not dimensions:
        return ReplicaSets(sets, expected)

    return ReplicaSets(sets, expected, "model parallel", f"parts along {', '.join(dimensions)}")


def _find_expected(
    present: Iterable[int], ranks: Iterable[int], coordinates: Coordinates, copied_dimensions: frozenset[str]
) -> tuple[int, ...]:
    """Return the ranks required to have a plain tensor: those with the coordinates of a rank that has it.

    present: the ranks that have it.
    """
    coordinates_with_tensor = {_without(coordinates[rank], copied_dimensions) for rank in present}
    expected = []
    for rank in ranks:
        if _without(coordinates[rank], copied_dimensions) in coordinates_with_tensor:
            expected.append(rank)

    return tuple(expected)


def _find_copied_dimensions(tensors: Mapping[int, Tensor]) -> frozenset[str]:
    """Return the dimensions of the meshes of whole DTensors, in lower case, along which all ranks hold copies."""
    dimensions: list[frozenset[str]] = []
    for tensor in tensors.values():
        names = () if tensor.sharding is None else tensor.sharding.names
        dimensions.append(frozenset(name.lower() for name in names))

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
) -> ReplicaSets:
    """Return the replica sets of a DTensor.

    shardings: by rank, of the ranks with a shard.
    present: the ranks with the tensor, some of which may hold it whole.
    """
    keys: dict[int, Hashable] = {}
    for rank in present:
        box = _identify_box(rank, shardings.get(rank))
        if box is None:  # replica of an unknown rank
            keys[rank] = rank
            continue

        outer = [pair for pair in positions.sharded.get(rank, ()) if pair[0] not in shardings[rank].names]
        copied_dimensions = PIPELINE if tied else frozenset[str]()
        keys[rank] = (box, _without(tuple(outer), copied_dimensions))

    sets = tuple(tuple(members) for members in group_ranks(keys).values())
    expected = _find_expected_shards(shardings, present, ranks, positions)
    return ReplicaSets(sets, expected, "DTensor", _describe_layout(shardings, present))


def _identify_box(rank: int, sharding: Sharding | None) -> Hashable | None:
    """Return a key that two ranks have in common if they hold the same box; None if the position is unknown."""
    coordinate = None if sharding is None else find_coordinate(rank, sharding)
    if sharding is None or coordinate is None:
        return None

    pairs = zip(sharding.placements, coordinate, strict=True)
    dividing_coordinates = tuple(number for placement, number in pairs if placement != "R")
    return sharding.mesh, sharding.names, sharding.placements, sharding.shape, dividing_coordinates


def _find_expected_shards(
    shardings: Mapping[int, Sharding], present: tuple[int, ...], ranks: tuple[int, ...], positions: Positions
) -> tuple[int, ...]:
    """Return the ranks required to have a DTensor: those of its meshes, and of the stages that have it."""
    mesh_ranks: set[int] = set()
    # Ranks share sharding objects, so a thousand ranks have only a few distinct objects.
    for sharding in {id(sharding): sharding for sharding in shardings.values()}.values():
        mesh_ranks.update(sharding.ranks)

    stages = {(positions.stages.get(rank), positions.sharded.get(rank)) for rank in present}
    expected = []
    for rank in ranks:
        is_in_mesh = positions.mesh_rank.get(rank, rank) in mesh_ranks
        stage = (positions.stages.get(rank), positions.sharded.get(rank))
        is_in_stage = rank in positions.stages and stage in stages
        if is_in_mesh or is_in_stage or rank in present:
            expected.append(rank)

    return tuple(expected)


def _describe_layout(shardings: Mapping[int, Sharding], present: Iterable[int]) -> str:
    """Describe the layout of a DTensor, and which ranks hold it whole. present: the ranks with the tensor."""
    distinct = {id(sharding): sharding for sharding in shardings.values()}
    texts = {layout_text(sharding) for sharding in distinct.values()}
    layout = "in different layouts"
    if len(texts) == 1:
        (layout,) = texts

    ranks_with_whole = [rank for rank in present if rank not in shardings]
    if ranks_with_whole:
        layout += f", but whole on {ranks_text(ranks_with_whole)}"

    return layout


def is_mixed(tensors: Mapping[int, Tensor]) -> bool:
    """Whether some ranks hold a shard and other ranks the whole tensor."""
    sharded = sum(t.sharding is not None and not is_whole(t.sharding) for t in tensors.values())
    return 0 < sharded < len(tensors)


def find_replicated(names: Iterable[str]) -> frozenset[str]:
    """Return the names of model and optimizer tensors that tensor parallelism replicates."""
    names = tuple(names)
    with_experts: set[str] = set()
    for name in names:
        module, experts, _ = name.partition(".experts.")
        if experts:
            with_experts.add(module)

    return frozenset(name for name in names if _is_step(name) or _is_replicated(_get_parameter(name), with_experts))


def _is_step(name: str) -> bool:
    """Whether a tensor counts the steps of a parameter; each shard of the parameter has the same count."""
    return name.startswith("optimizer.") and name.endswith(".step")


def _get_parameter(name: str) -> str:
    if not name.startswith("optimizer."):
        return name

    return name.removeprefix("optimizer.").rpartition(".")[0]


def _is_replicated(name: str, with_experts: Collection[str]) -> bool:
    """Whether the name of a parameter shows that all tensor-parallel ranks hold it whole.

    with_experts: the modules with experts.
    """
    *modules, leaf = name.lower().split(".")
    if not modules or any(_DIVIDED.search(module) for module in modules):
        return False

    module = modules[-1]
    parent = modules[-2] if len(modules) > 1 else ""
    if leaf in _FUSED:
        return True

    if leaf in _NORM_LEAVES and _NORM.fullmatch(module):
        return not _INNER.fullmatch(parent)

    is_router = "router" in (module, parent)
    is_gate = module == "gate" and name.rpartition(".gate.")[0] in with_experts
    if leaf in _ROUTER_LEAVES and (is_router or is_gate):
        return True

    is_row_parallel = module in _ROW_PARALLEL or (module == "dense" and parent in _ATTENTION)
    return leaf == "bias" and is_row_parallel
