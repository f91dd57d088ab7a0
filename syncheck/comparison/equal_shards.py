"""Find shards of one tensor at different positions that hold equal bytes, although they were drawn at random.

Replicas must be equal, and shards must not: equal shards show that all ranks drew their shards from one random stream.
Tensors that nobody drew are no evidence: zeros, ones, and patterns with few values. So a shard counts only if it has
`LEAST_VALUES` different values. Two independent draws agree in one element of a narrow dtype with a probability of less
than 1/20, and in 64 elements with less than 1e-83, so chance plays no role for any number of tensors and ranks.

The usual case is cheap. A live check has digests of all shards. Files have checksums, or else the first elements of
each shard are read. Only shards that agree in them are read to the end.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

from syncheck.findings import EqualShards
from syncheck.layout.distinct_shards import find_distinct_shards
from syncheck.tensors.clustering import cluster_by_key, cluster_replicas
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.finiteness import FiniteScan

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.layout.alignment import Alignment
    from syncheck.layout.replica_groups import Sets
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

_Item = TypeVar("_Item")

# Different values of a shard that was drawn at random. Patterns have fewer: the decay rates of Mamba repeat 16 values.
LEAST_VALUES = 64
# Elements that are read at once, in the search for different shards and for different values.
_SAMPLE = 1024
# Samples of a shard that are searched for different values. The rows of padding in an embedding are zero.
_SAMPLES = 16


def find_equal_shards(
    names: Iterable[str], tensors: Mapping[str, Mapping[int, Tensor]], alignment: Alignment, files: Files
) -> tuple[EqualShards, ...]:
    """Return the tensors with equal shards at different positions.

    names: of the tensors to search.
    tensors: by name and rank.
    Raises CheckpointError if a file can no longer be read.
    """
    equal_shards: list[EqualShards] = []
    for name in names:
        by_rank = tensors[name]
        for replica_groups in _find_shards(name, by_rank, alignment):
            shards = _get_shards(by_rank, replica_groups)
            clusters = _cluster_drawn(shards, files)
            if clusters:
                described = _describe(name, replica_groups, clusters)
                equal_shards.append(described)

    return tuple(equal_shards)


def find_equal_digests(alignment: Alignment) -> dict[str, list[int]]:
    """Return the first rank of each set of shards with equal digests at different positions, by name.

    The bytes of these ranks show whether the shards were drawn at random.
    """
    first_ranks: dict[str, list[int]] = defaultdict(list)
    for name, by_rank in alignment.tensors.items():
        for replica_groups in _find_shards(name, by_rank, alignment):
            digests = _list_marks(_get_shards(by_rank, replica_groups))
            for positions in _select_equal(cluster_by_key(digests)):
                first_position = positions[0]
                first_rank = replica_groups[first_position][0]
                first_ranks[name].append(first_rank)

    return first_ranks


def _find_shards(name: str, tensors: Mapping[int, Tensor], alignment: Alignment) -> Sequence[Sets]:
    """Return the shards to compare with each other, as `find_distinct_shards`; empty if no two of them can be equal."""
    first_tensor = next(iter(tensors.values()))
    may_be_shard = first_tensor.sharding is not None or bool(alignment.positions.plain)
    if not may_be_shard or not _may_be_drawn(first_tensor):
        return ()

    # Equal shards have equal digests and checksums. To find positions takes longer than this test.
    marks = set(_list_marks(tensors.values()))
    are_all_different = len(marks) == len(tensors)
    if are_all_different and None not in marks:
        return ()

    return find_distinct_shards(name, tensors, alignment)


def _may_be_drawn(tensor: Tensor) -> bool:
    """Whether a tensor holds floats, is large enough, and can be read."""
    conditions = (
        not tensor.refused,
        # A fingerprint has no bytes.
        tensor.digest is None,
        tensor.numel >= LEAST_VALUES,
        FiniteScan(tensor.dtype).is_float,
    )
    return all(conditions)


def _get_shards(tensors: Mapping[int, Tensor], replica_groups: Sets) -> list[Tensor]:
    """Return one shard of each replica group. tensors: by rank."""
    return [tensors[ranks[0]] for ranks in replica_groups]


def _list_marks(tensors: Iterable[Tensor]) -> list[Hashable]:
    """Return the digest or the checksum of each tensor: equal tensors have equal marks. None without both."""
    return [tensor.same or tensor.crc32 for tensor in tensors]


def _select_equal(clusters: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the clusters with at least two members."""
    return [positions for positions in clusters if len(positions) > 1]


def _describe(name: str, replica_groups: Sets, clusters: Sequence[Sequence[int]]) -> EqualShards:
    """Return the equal shards of a tensor. clusters: equal shards, as positions in the replica groups."""
    sets: list[tuple[int, ...]] = []
    for positions in clusters:
        ranks: list[int] = []
        for position in positions:
            ranks += replica_groups[position]

        sets.append(tuple(sorted(ranks)))

    return EqualShards(
        name=name,
        shards=len(replica_groups),
        equal=max(map(len, clusters)),
        clusters=tuple(sets),
    )


def _cluster_drawn(shards: Sequence[Tensor], files: Files) -> list[tuple[int, ...]]:
    """Return clusters of equal shards that were drawn at random, as positions in `shards`.

    shards: of one tensor, with the same shape and dtype.
    """
    clusters: list[tuple[int, ...]] = []
    for positions in _select_equal(cluster_by_start(shards, files)):
        candidates = _pick(shards, positions)
        # The values of one shard stand for all equal shards.
        if not _has_many_values(candidates[0], files):
            continue

        for equal_positions in _select_equal(cluster_replicas(candidates, files)):
            cluster = _pick(positions, equal_positions)
            clusters.append(tuple(cluster))

    return clusters


def _pick(items: Sequence[_Item], positions: Iterable[int]) -> list[_Item]:
    """Return the items at some positions."""
    return [items[position] for position in positions]


def cluster_by_start(shards: Sequence[Tensor], files: Files) -> tuple[tuple[int, ...], ...]:
    """Return clusters of shards that may be equal, as positions in `shards`: different clusters are different."""
    marks = _list_marks(shards)
    # A checksum is of use only if all shards have one.
    if None not in marks:
        return cluster_by_key(marks)

    count = min(_SAMPLE, shards[0].numel)
    starts: list[bytes] = []
    for tensor in shards:
        start = files.read(tensor, 0, count, 0)
        starts.append(bytes(start))

    return cluster_by_key(starts)


def _has_many_values(tensor: Tensor, files: Files) -> bool:
    """Whether samples of a shard have at least `LEAST_VALUES` different values."""
    size = DTYPES[tensor.dtype].size
    values: set[bytes] = set()
    for start in range(0, tensor.numel, max(_SAMPLE, tensor.numel // _SAMPLES)):
        count = min(_SAMPLE, tensor.numel - start)
        sample = bytes(files.read(tensor, start, count, 0))
        for position in range(0, len(sample), size):
            element = sample[position : position + size]
            values.add(element)

        if len(values) >= LEAST_VALUES:
            return True

    return False
