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
    from collections.abc import Hashable, Iterable, Mapping

    from syncheck.snapshots import Sharding, Snapshot, Tensor

    Coordinates = Mapping[int, tuple[tuple[str, int], ...]]

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
    plain, sharded, mesh_rank, native = {}, {}, {}, False
    for rank, snapshot in snapshots.items():
        shardings = {id(t.sharding): t.sharding for t in snapshot.tensors.values() if t.sharding is not None}
        located = next((sharding for sharding in shardings.values() if sharding.coordinate), None)
        mesh_rank[rank] = rank if located is None else find_mesh_rank(located)
        native = native or any(TENSOR_PARALLEL & set(map(str.lower, s.names)) for s in shardings.values())
        mesh = dict(snapshot.mesh or (snapshot.metadata.mesh if snapshot.metadata is not None else {}))
        dividing = MODEL_PARALLEL if mesh else PIPELINE
        plain[rank] = tuple(sorted(at for at in (mesh or mesh_of(snapshot)).items() if at[0].lower() in dividing))
        sharded[rank] = plain[rank]
    if native:
        sharded = {rank: _without(position, TENSOR_PARALLEL) for rank, position in plain.items()}
    return Positions(
        plain if any(plain.values()) else {},
        sharded if any(sharded.values()) else {},
        mesh_rank,
        _number_stages(snapshots),
    )


def _without(position: tuple[tuple[str, int], ...], names: frozenset[str]) -> tuple[tuple[str, int], ...]:
    return tuple(at for at in position if at[0].lower() not in names)


def _number_stages(snapshots: Mapping[int, Snapshot]) -> dict[int, int]:
    """Number pipeline stages by the names of DTensors: ranks of a stage have most names in common."""
    names = {
        rank: frozenset(name for name, tensor in snapshot.tensors.items() if tensor.sharding is not None)
        for rank, snapshot in snapshots.items()
    }
    numbers: dict[frozenset[str], int] = {}
    for own in sorted(set(names.values()), key=len, reverse=True):
        overlapping = (number for known, number in numbers.items() if 2 * len(own & known) > len(own))
        numbers[own] = next(overlapping, len(numbers))
    return {rank: numbers[own] for rank, own in names.items() if own}


def mesh_of(snapshot: Snapshot) -> dict[str, int]:
    """Return the mesh coordinate of a rank by dimension, from the file name, else the metadata, else the DTensors."""
    if snapshot.mesh or (snapshot.metadata is not None and snapshot.metadata.mesh):
        return dict(snapshot.mesh or snapshot.metadata.mesh)  # type: ignore[union-attr]  # checked above
    shardings = {id(t.sharding): t.sharding for t in snapshot.tensors.values() if t.sharding is not None}
    coordinates = [
        {**dict(sharding.beside), **dict(zip(sharding.names, sharding.coordinate, strict=True))}
        for sharding in shardings.values()
        if sharding.names and len(sharding.names) == len(sharding.coordinate)
    ]
    return max(coordinates, key=len, default={})


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
    parts = {r: t.sharding for r, t in tensors.items() if t.sharding is not None and not is_whole(t.sharding)}
    if parts:
        return _divide_dtensor(parts, tuple(tensors), ranks, positions, tied=tied)
    if not positions.plain:
        return ReplicaSets((tuple(tensors),), ranks)
    copied = _find_copied_dimensions(tensors)
    coordinates = {rank: _without(position, copied) for rank, position in positions.plain.items()}
    present = {coordinates[rank] for rank in tensors}
    expected = tuple(rank for rank in ranks if coordinates[rank] in present)
    same_shape = len({t.shape for t in tensors.values()}) == 1
    if replicated and same_shape:
        coordinates = {rank: _without(position, TENSOR_PARALLEL) for rank, position in coordinates.items()}
    if tied:
        coordinates = {rank: _without(position, PIPELINE) for rank, position in coordinates.items()}
    sets = tuple(map(tuple, group_ranks({rank: coordinates[rank] for rank in tensors}).values()))
    dims = ", ".join(dict.fromkeys(name for position in coordinates.values() for name, _ in position))
    if not dims:
        return ReplicaSets(sets, expected)
    return ReplicaSets(sets, expected, "model parallel", f"parts along {dims}")


def _find_copied_dimensions(tensors: Mapping[int, Tensor]) -> frozenset[str]:
    """Return the dimensions of the meshes of whole DTensors, in lower case, along which all ranks hold copies."""
    names = (t.sharding.names if t.sharding is not None else () for t in tensors.values())
    copied = frozenset.intersection(*(frozenset(map(str.lower, own)) for own in names))
    return copied | TENSOR_PARALLEL if copied & TENSOR_PARALLEL else copied


def _divide_dtensor(
    parts: Mapping[int, Sharding],
    present: tuple[int, ...],
    ranks: tuple[int, ...],
    positions: Positions,
    *,
    tied: bool,
) -> ReplicaSets:
    keys: dict[int, Hashable] = {}
    # Ranks share sharding objects, so a thousand ranks have only a few distinct objects.
    shardings = {id(sharding): sharding for sharding in parts.values()}
    layouts: dict[Hashable, int] = {}
    numbers = {
        key: layouts.setdefault((s.mesh, s.names, s.placements, s.shape), len(layouts)) for key, s in shardings.items()
    }
    for rank in present:
        sharding = parts.get(rank)
        position = None if sharding is None else find_coordinate(rank, sharding)
        if sharding is None or position is None:  # replica of an unknown rank
            keys[rank] = rank
            continue
        divided = tuple(i for placement, i in zip(sharding.placements, position, strict=True) if placement != "R")
        outer = tuple(at for at in positions.sharded.get(rank, ()) if at[0] not in sharding.names)
        keys[rank] = numbers[id(sharding)], divided, _without(outer, PIPELINE) if tied else outer
    members = {rank for sharding in shardings.values() for rank in sharding.ranks}
    stages = {(positions.stages.get(rank), positions.sharded.get(rank)) for rank in present}
    expected = tuple(
        rank
        for rank in ranks
        if positions.mesh_rank.get(rank, rank) in members
        or rank in present
        or (rank in positions.stages and (positions.stages[rank], positions.sharded.get(rank)) in stages)
    )
    texts = dict.fromkeys(layout_text(sharding) for sharding in shardings.values())
    layout = next(iter(texts)) if len(texts) == 1 else "in different layouts"
    whole = [rank for rank in present if rank not in parts]
    if whole:
        layout += f", but whole on {ranks_text(whole)}"
    return ReplicaSets(tuple(map(tuple, group_ranks(keys).values())), expected, "DTensor", layout)


def is_mixed(tensors: Mapping[int, Tensor]) -> bool:
    """Whether some ranks hold a shard and other ranks the whole tensor."""
    sharded = sum(t.sharding is not None and not is_whole(t.sharding) for t in tensors.values())
    return 0 < sharded < len(tensors)


def find_replicated(names: Iterable[str]) -> frozenset[str]:
    """Return the names of model and optimizer tensors that tensor parallelism replicates."""
    names = tuple(names)
    with_experts = {name[: name.index(".experts.")] for name in names if ".experts." in name}
    return frozenset(name for name in names if _is_step(name) or _is_replicated(_parameter_name(name), with_experts))


def _is_step(name: str) -> bool:
    """Whether a tensor counts the steps of a parameter; each shard of the parameter has the same count."""
    return name.startswith("optimizer.") and name.endswith(".step")


def _parameter_name(name: str) -> str:
    if not name.startswith("optimizer."):
        return name
    return name.removeprefix("optimizer.").rpartition(".")[0]


def _is_replicated(name: str, with_experts: Iterable[str]) -> bool:
    *above, leaf = name.lower().split(".")
    if not above:
        return False
    *higher, module = above
    if any(_DIVIDED.search(part) for part in above):
        return False
    if leaf in _FUSED:
        return True
    if leaf in _NORM_LEAVES and _NORM.fullmatch(module):
        return not (higher and _INNER.fullmatch(higher[-1]))
    if leaf in _ROUTER_LEAVES and "router" in above[-2:]:
        return True
    if leaf in _ROUTER_LEAVES and module == "gate" and name.rpartition(".gate.")[0] in with_experts:
        return True
    if leaf != "bias":
        return False
    return module in _ROW_PARALLEL or (module == "dense" and bool(higher) and higher[-1] in _ATTENTION)
