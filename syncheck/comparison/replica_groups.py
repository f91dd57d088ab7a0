"""Which ranks ought to hold the same bytes of one tensor.

A plain tensor: all ranks; where the metadata places them in a tensor, pipeline or expert parallel mesh, those that
stand at one place of it. Within such a mesh a plain tensor may be replicated or a part, and nothing in a file tells;
those whose name and shape say that tensor parallelism does not divide them are compared along that dimension too.
A DTensor: the ranks of its mesh with the same coordinate on every dimension along which it is divided, whether into
shards or into parts of a sum. So HSDP is compared along the replicate dimension, and FSDP's shards with nothing.
A mesh may cover some of the ranks only (tensor parallel ranks inside DDP). Ranks with equal coordinates in sibling
meshes are replicas, unless they stand in different pipeline stages.
If some ranks hold shards of a tensor and others the whole, the shards of one mesh are put together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING

from syncheck.messages import ranks_text
from syncheck.snapshots import Part, Tensor, in_c_order
from syncheck.tensor_parallel import TENSOR_PARALLEL

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from syncheck.snapshots import Sharding, Snapshot

    Coordinates = Mapping[int, tuple[tuple[str, int], ...]]

# Names of mesh dimensions along which ranks hold other parameters, as the libraries and their examples call them.
# Along dp, replicate, shard, fsdp and cp (context) every rank has the same plain tensors.
MODEL_PARALLEL = frozenset(
    "tp tensor tensor_parallel model model_parallel mp pp pipe pipeline pipeline_parallel stage ep expert "
    "expert_parallel etp".split()
)
# Along these, ranks whose DTensors are of one mesh hold other parameters; along tp and ep torch makes DTensors of them.
PIPELINE = frozenset("pp pipe pipeline pipeline_parallel stage".split())
Sets = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Positions:
    """Where the ranks of a group stand.

    plain, sharded: along the dimensions that divide plain tensors, and that divide DTensors besides their own mesh;
    empty if no rank has one. standing: which rank of a mesh each rank is: a file may be renamed, or given by position.
    stages: a number for each rank that has DTensors; ranks of one number have most names in common.
    """

    plain: Coordinates = field(default_factory=dict)
    sharded: Coordinates = field(default_factory=dict)
    standing: Mapping[int, int] = field(default_factory=dict)
    stages: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Division:
    """The sets of ranks that ought to hold the same bytes, by their first ranks; of ranks that have the tensor.

    expected: the ranks that ought to have it. kind: `DTensor`, `model parallel`, or empty for a plain tensor of all
    ranks. layout: how the parts lie, in words.
    """

    sets: Sets
    expected: tuple[int, ...]
    kind: str = ""
    layout: str = ""

    @property
    def comparable(self) -> Sets:
        """The sets of two ranks or more."""
        return tuple(found for found in self.sets if len(found) > 1)


def find_positions(snapshots: Mapping[int, Snapshot]) -> Positions:
    """Locate each rank by the mesh in its file's name, else in its metadata, else in its DTensors."""
    plain, sharded, standing, native = {}, {}, {}, False
    for rank, snapshot in snapshots.items():
        shardings = {id(t.sharding): t.sharding for t in snapshot.tensors.values() if t.sharding is not None}
        at = next((found for found in shardings.values() if found.coordinate), None)
        standing[rank] = rank if at is None else _rank_at(at)
        native = native or any(TENSOR_PARALLEL & set(map(str.lower, found.names)) for found in shardings.values())
        mesh = dict(snapshot.mesh or (snapshot.metadata.mesh if snapshot.metadata is not None else {}))
        dividing = MODEL_PARALLEL if mesh else PIPELINE
        plain[rank] = tuple(sorted(at for at in (mesh or mesh_of(snapshot)).items() if at[0].lower() in dividing))
        sharded[rank] = plain[rank]
    if native:
        sharded = {r: tuple(at for at in place if at[0].lower() not in TENSOR_PARALLEL) for r, place in plain.items()}
    return Positions(
        plain if any(plain.values()) else {}, sharded if any(sharded.values()) else {}, standing, _stages(snapshots)
    )


def _stages(snapshots: Mapping[int, Snapshot]) -> dict[int, int]:
    """Number the ranks by the names of their DTensors: ranks with most names in common hold the same parameters."""
    names = {
        rank: frozenset(name for name, tensor in snapshot.tensors.items() if tensor.sharding is not None)
        for rank, snapshot in snapshots.items()
    }
    numbers: dict[frozenset[str], int] = {}
    for own in sorted(set(names.values()), key=len, reverse=True):
        alike = (number for known, number in numbers.items() if 2 * len(own & known) > len(own))
        numbers[own] = next(alike, len(numbers))
    return {rank: numbers[own] for rank, own in names.items() if own}


def mesh_of(snapshot: Snapshot) -> dict[str, int]:
    """Return where a rank stands by dimension of the mesh: by its file's name, else its metadata, else its DTensors."""
    if snapshot.mesh or (snapshot.metadata is not None and snapshot.metadata.mesh):
        return dict(snapshot.mesh or snapshot.metadata.mesh)  # type: ignore[union-attr]  # one of them is there
    shardings = {id(t.sharding): t.sharding for t in snapshot.tensors.values() if t.sharding is not None}
    told = [
        {**dict(found.beside), **dict(zip(found.names, found.coordinate, strict=True))}
        for found in shardings.values()
        if found.names and len(found.names) == len(found.coordinate)
    ]
    return max(told, key=len, default={})


def divide(
    tensors: Mapping[int, Tensor], ranks: tuple[int, ...], at: Positions, *, replicated: bool = False
) -> Division:
    """Sort the ranks that have a tensor into replica groups.

    ranks: all; at: where they stand. replicated: whether the tensor's name says that every tensor-parallel rank has the
    whole; unequal shapes say otherwise.
    """
    parts = {r: t.sharding for r, t in tensors.items() if t.sharding is not None and not is_whole(t.sharding)}
    if parts:
        return _by_mesh(parts, tuple(tensors), ranks, at)
    places = at.plain
    if not places:
        return Division((tuple(tensors),), ranks)
    present = {places[rank] for rank in tensors}
    expected = tuple(rank for rank in ranks if places[rank] in present)
    if (replicated and len({t.shape for t in tensors.values()}) == 1) or all(map(_is_told_whole, tensors.values())):
        places = {
            rank: tuple(at for at in place if at[0].lower() not in TENSOR_PARALLEL) for rank, place in places.items()
        }
    sets = _classes({rank: places[rank] for rank in tensors})
    dims = ", ".join(dict.fromkeys(name for place in places.values() for name, _ in place))
    if not dims:
        return Division(sets, expected)
    return Division(sets, expected, "model parallel", f"parts along {dims}")


def _is_told_whole(tensor: Tensor) -> bool:
    """Whether a DTensor says that it is replicated along the tensor-parallel dimension."""
    return tensor.sharding is not None and bool({name.lower() for name in tensor.sharding.names} & TENSOR_PARALLEL)


def is_whole(sharding: Sharding) -> bool:
    """Whether each rank of the mesh holds the whole tensor; a dimension of one rank divides nothing."""
    return all(p == "R" or size == 1 for p, size in zip(sharding.placements, sharding.mesh, strict=True))


def layout_text(sharding: Sharding) -> str:
    """Say how a DTensor is laid out: 'copied to 2 along replicate, divided in 2 along shard (dimension 0)'."""
    names = sharding.names or ("",) * len(sharding.mesh)
    return ", ".join(map(_placement_text, sharding.placements, sharding.mesh, names))


def _placement_text(placement: str, size: int, name: str) -> str:
    """placement: as torch prints it: R, S(0), _S(0, 2) in stripes, P(sum)."""
    along = f" along {name}" if name else ""
    if placement == "R":
        return f"copied to {size}{along}"
    what, _, within = placement.rstrip(")").partition("(")
    if what == "P":
        return f"{size} parts of a {within or 'sum'}{along}"
    dimension, _, stripes = within.partition(",")
    striped = f", in stripes of {stripes.strip()}" if stripes else ""
    return f"divided in {size}{along} (dimension {dimension}{striped})"


def _by_mesh(parts: Mapping[int, Sharding], having: tuple[int, ...], ranks: tuple[int, ...], at: Positions) -> Division:
    keys: dict[int, Hashable] = {}
    # A thousand ranks share a layout or two, each of a thousand ranks: these are looked at once.
    different = {id(sharding): sharding for sharding in parts.values()}
    layouts: dict[Hashable, int] = {}
    numbers = {
        key: layouts.setdefault((found.mesh, found.names, found.placements, found.shape), len(layouts))
        for key, found in different.items()
    }
    for rank in having:
        sharding = parts.get(rank)
        place = None if sharding is None else coordinate(rank, sharding)
        if sharding is None or place is None:  # of its own: nothing tells whose replica it is
            keys[rank] = rank
            continue
        divided = tuple(i for placement, i in zip(sharding.placements, place, strict=True) if placement != "R")
        beside = tuple(one for one in at.sharded.get(rank, ()) if one[0] not in sharding.names)
        keys[rank] = numbers[id(sharding)], divided, beside
    members = {rank for sharding in different.values() for rank in sharding.ranks}
    stages = {(at.stages.get(rank), at.sharded.get(rank)) for rank in having}
    expected = tuple(
        rank
        for rank in ranks
        if at.standing.get(rank, rank) in members
        or rank in having
        or (rank in at.stages and (at.stages[rank], at.sharded.get(rank)) in stages)
    )
    texts = dict.fromkeys(layout_text(sharding) for sharding in different.values())
    layout = next(iter(texts)) if len(texts) == 1 else "laid out in unlike ways"
    whole = [rank for rank in having if rank not in parts]
    if whole:
        layout += f", but whole on {ranks_text(whole)}"
    return Division(_classes(keys), expected, "DTensor", layout)


def coordinate(rank: int, sharding: Sharding) -> tuple[int, ...] | None:
    """Say where in the mesh a rank stands: by what its file says, else by its rank; None where neither tells."""
    if sharding.coordinate:
        return sharding.coordinate
    return _by_rank(sharding.ranks, sharding.mesh).get(rank)


@lru_cache(maxsize=64)
def _by_rank(ranks: tuple[int, ...], mesh: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    return dict(zip(ranks, product(*map(range, mesh)), strict=False))


def _rank_at(sharding: Sharding) -> int:
    """Return the rank that stands at the coordinate of a sharding."""
    at = 0
    for i, size in zip(sharding.coordinate, sharding.mesh, strict=True):
        at = at * size + i
    return sharding.ranks[at]


def _classes(keys: Mapping[int, Hashable]) -> Sets:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for rank, key in keys.items():
        found[key].append(rank)
    return tuple(tuple(members) for members in found.values())


def is_mixed(tensors: Mapping[int, Tensor]) -> bool:
    """Whether some ranks hold a shard and others the whole."""
    sharded = sum(t.sharding is not None and not is_whole(t.sharding) for t in tensors.values())
    return 0 < sharded < len(tensors)


def assemble_shards(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the whole tensor for each rank; empty if a shard is missing, or its position is not known."""
    boxes: dict[Hashable, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    keys: dict[int, Hashable] = {}
    for rank, tensor in tensors.items():
        if tensor.sharding is None or is_whole(tensor.sharding):
            continue
        box = _box(rank, tensor)
        if box is None:
            return {}
        keys[rank], start = box
        boxes[keys[rank]].setdefault(start, tensor)
    made = {}
    for key, found in boxes.items():
        first = next(iter(found.values()))
        shape = first.sharding.shape if first.sharding is not None else ()
        alike = len({tensor.dtype for tensor in found.values()}) == 1
        if not alike or sum(tensor.numel for tensor in found.values()) != math.prod(shape):
            return {}
        parts = tuple(Part(tensor, start) for start, tensor in sorted(found.items()) if tensor.numel)
        whole = Tensor(first.name, first.dtype, shape, in_c_order(shape), first.path, 0, data=None if parts else b"")
        made[key] = replace(whole, parts=parts)
    return {rank: made[keys[rank]] if rank in keys else tensor for rank, tensor in tensors.items()}


def _box(rank: int, tensor: Tensor) -> tuple[Hashable, tuple[int, ...]] | None:
    """Return which copy of the whole a shard belongs to and where it begins, by the rules of torch.chunk."""
    sharding = tensor.sharding
    place = None if sharding is None else coordinate(rank, sharding)
    if sharding is None or place is None or tensor.refused or tensor.digest is not None or tensor.same:
        return None
    start, size, copy = [0] * len(sharding.shape), list(sharding.shape), []
    for placement, at, count in zip(sharding.placements, place, sharding.mesh, strict=True):
        if placement == "R":
            copy.append(at)
        elif placement.startswith("S(") and (dim := int(placement[2:-1])) < len(size):
            rows = -(-size[dim] // count)
            begin = min(at * rows, size[dim])
            start[dim], size[dim] = start[dim] + begin, min(rows, size[dim] - begin)
        else:
            return None
    return ((sharding.ranks, tuple(copy)), tuple(start)) if tuple(size) == tensor.shape else None


def format_sets(sets: Sets) -> str:
    """Name a few sets of ranks: 'ranks 0, 2 and ranks 1, 3'."""
    texts = [ranks_text(found) for found in sets[:3]]
    more = f" and {len(sets) - 3} more" if len(sets) > 3 else ""
    return " and ".join(texts) + more
