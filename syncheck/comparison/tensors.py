"""Compare the replicas of one tensor: presence, shape, dtype, bytes, and the size of differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.comparison.mismatches import find_mismatch, find_unequal, make_bare_diff, with_clusters
from syncheck.layout.dtensors import is_part_of_sum
from syncheck.messages import Detail
from syncheck.records import Reason, largest_first, minority_of
from syncheck.tensors.clustering import cluster_replicas
from syncheck.text import sets_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.replica_groups import ReplicaGroups, Sets
    from syncheck.records import Status, TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.digests import DigestResult
    from syncheck.tensors.finiteness import FiniteScan
    from syncheck.tensors.tolerance import Tolerance

# From the weakest to the strongest result.
_ORDER: tuple[Status, ...] = ("identical", "equal", "close", "not_compared", "different")
# Why tensors of which each rank holds another part are not compared, by whether they are parts of a sum.
_DIFFERENT_PARTS = {
    False: (Reason.SHARDED, Detail.SHARDED),
    True: (Reason.AMBIGUOUS, Detail.PARTS_OF_SUM),
}


class ComparisonMethod(NamedTuple):
    """How to compare the bytes of one tensor.

    files: open files.
    tolerance: of the tensor.
    scan: searches the bytes that are read for NaN and infinity.
    quick: compare stored checksums only.
    """

    files: Files
    tolerance: Tolerance
    scan: FiniteScan
    quick: bool


def compare_tensor(
    name: str,
    kind: str,
    tensors: Mapping[int, Tensor],
    replica_groups: ReplicaGroups,
    method: ComparisonMethod,
    *,
    sharded: bool,
) -> TensorDiff | None:
    """Compare the replicas of one tensor within each replica group. Return None if they are identical.

    tensors: by rank.
    replica_groups: the ranks that must hold equal bytes, and the ranks required to have the tensor.
    method: how to compare the bytes.
    sharded: whether each rank holds different tensors by design, so missing tensors are no difference.
    Raises CheckpointError if a file can no longer be read.
    """
    bare = make_bare_diff(name, kind, tensors)
    mismatch = find_mismatch(bare, tensors, replica_groups)
    groups_to_compare = replica_groups
    if mismatch is not None:
        # Ranks with equal shapes and dtypes can still be compared with each other.
        groups_to_compare = _select_matching(mismatch, tensors, replica_groups)
    elif replica_groups.has_only_shards:
        mismatch = _make_sharded(bare, tensors, replica_groups)

    diffs = []
    for ranks in groups_to_compare.comparable:
        diff_of_group = _compare_replicas(
            bare,
            tensors,
            ranks,
            method,
        )
        if diff_of_group is not None:
            diffs.append(diff_of_group)

    diff = _join_diffs(diffs, groups_to_compare)
    if mismatch is not None:
        diff = _add_values(mismatch, diff)

    return _add_missing(
        diff,
        bare,
        tensors,
        replica_groups,
        sharded=sharded,
    )


def _make_sharded(bare: TensorDiff, tensors: Mapping[int, Tensor], replica_groups: ReplicaGroups) -> TensorDiff:
    """Return the diff of a tensor of which each rank holds another part.

    Shards are parts of the model, and nothing to compare. Only the sum of the parts of a sum is a tensor of the model.
    """
    first = next(iter(tensors.values()))
    reason, sentence = _DIFFERENT_PARTS[is_part_of_sum(first)]
    return replace(bare, reason=reason, detail=sentence(layout=replica_groups.layout))


def _add_values(mismatch: TensorDiff, values: TensorDiff | None) -> TensorDiff:
    """Return the mismatch of a tensor together with the differences of its values.

    values: the diff of the ranks whose values can be compared; None if they are equal.
    """
    if values is None:
        return mismatch

    if not values.out_of_sync:
        return mismatch

    if mismatch.out_of_sync:
        return replace(mismatch, facts=(mismatch, values))

    # A tensor refused by the reader on some ranks is not a difference by itself.
    return replace(values, detail=mismatch.detail)


def _make_missing(
    bare: TensorDiff, present: tuple[int, ...], expected: tuple[int, ...], missing_ranks: tuple[int, ...]
) -> TensorDiff:
    """Return the diff of a tensor that some ranks lack. present, expected: ranks that have it, or must have it."""
    diff = with_clusters(bare, expected, largest_first((present, missing_ranks)))
    return replace(
        diff,
        reason=Reason.MISSING,
        detail=Detail.MISSING(ranks=missing_ranks),
        clusters=(present,),
    )


def _add_missing(
    diff: TensorDiff | None,
    bare: TensorDiff,
    tensors: Mapping[int, Tensor],
    replica_groups: ReplicaGroups,
    *,
    sharded: bool,
) -> TensorDiff | None:
    """Return the diff of a tensor together with the ranks that lack it. Arguments as in `compare_tensor`.

    diff: of the ranks that have the tensor; None if they are identical.
    """
    # Ranks of other pipeline stages or experts do not need the tensor.
    missing_ranks = tuple(rank for rank in replica_groups.expected if rank not in tensors)
    if not missing_ranks:
        return diff

    present_ranks = tuple(tensors)
    if sharded:
        # All ranks with the tensor agree.
        if diff is None and len(present_ranks) > 1:
            return None

        if diff is None or diff.reason is Reason.SHARDED:
            return replace(
                bare,
                reason=Reason.SHARDED,
                detail=Detail.PARTITIONED(ranks=present_ranks),
            )

    missing = _make_missing(
        bare,
        present_ranks,
        replica_groups.expected,
        missing_ranks,
    )
    return missing if diff is None else _join_missing(diff, missing, present_ranks)


def _join_missing(diff: TensorDiff, missing: TensorDiff, present: tuple[int, ...]) -> TensorDiff:
    """Return the diff of a tensor that differs, and that some ranks lack. present: the ranks that have it."""
    clustered = set[int]().union(*diff.clusters)
    # Ranks of replica groups without a difference are in no cluster yet.
    unclustered = tuple(rank for rank in present if rank not in clustered)
    clusters = diff.clusters
    if unclustered:
        clusters = (*clusters, unclustered)

    facts: tuple[TensorDiff, ...] = ()
    if diff.out_of_sync:
        facts = (missing, *(diff.facts or (diff,)))

    return replace(
        diff,
        status="different" if diff.status == "different" else "not_compared",
        reason=missing.reason,
        detail=missing.detail,
        replica_groups=missing.replica_groups,
        clusters=clusters,
        minority=diff.minority or missing.minority,
        facts=facts,
    )


def _select_matching(
    mismatch: TensorDiff, tensors: Mapping[int, Tensor], replica_groups: ReplicaGroups
) -> ReplicaGroups:
    """Return the sets of ranks with the same shape and dtype, if not all ranks have the same."""
    matching_sets: list[tuple[int, ...]] = []
    for ranks in replica_groups.sets:
        matching_sets += _group_by_type(tensors, ranks)

    return replace(
        replica_groups,
        sets=tuple(matching_sets),
        layout=replica_groups.layout or f"of one {mismatch.reason}",
    )


def _group_by_type(tensors: Mapping[int, Tensor], ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the sets of several ranks whose tensors can be read and have the same dtype and shape."""
    by_type: dict[Any, list[int]] = defaultdict(list)
    for rank in ranks:
        tensor = tensors[rank]
        if not tensor.refused:
            by_type[tensor.dtype, tensor.shape].append(rank)

    return [tuple(matching_ranks) for matching_ranks in by_type.values() if len(matching_ranks) > 1]


def _compare_replicas(
    bare: TensorDiff, tensors: Mapping[int, Tensor], ranks: tuple[int, ...], method: ComparisonMethod
) -> TensorDiff | None:
    """Compare the replicas of one replica group. Return None if they are identical. ranks: of the group."""
    members = tensors
    if len(ranks) < len(tensors):
        members = {rank: tensors[rank] for rank in ranks}
        bare = make_bare_diff(bare.name, bare.kind, members)

    # torch writes equal shapes for equal mesh coordinates, but untrusted files may not.
    shapes = {rank: tensor.shape for rank, tensor in members.items()}
    mismatch = find_unequal(
        bare,
        Reason.SHAPE,
        shapes,
        members,
    )
    if mismatch is not None:
        return mismatch

    replicas = list(members.values())
    result = _compare_without_bytes(replicas, method)
    if result is not None:
        return _describe_digests(bare, tuple(members), result)

    # Replicas of other dtypes than the first one differ from it, so they need no search.
    scan = method.scan if bare.dtype == method.scan.dtype else None
    clusters = cluster_replicas(replicas, method.files, scan)
    if len(clusters) == 1:
        return None

    return _measure_clusters(
        bare,
        members,
        clusters,
        method,
    )


def _rank_by_difference(diff: TensorDiff) -> tuple[int, float]:
    """Return a sort key: by the status, then by the size of the difference."""
    return _ORDER.index(diff.status), diff.max_abs or 0


def _join_diffs(diffs: Sequence[TensorDiff], replica_groups: ReplicaGroups) -> TensorDiff | None:
    """Return one diff of several replica groups, with the numbers of the worst set; None without a difference."""
    if not diffs:
        return None

    if len(replica_groups.sets) == 1:
        return diffs[0]

    # The numbers of several sets have no common reference, so those of the worst set stand for all.
    worst = max(diffs, key=_rank_by_difference)
    clusters: list[tuple[int, ...]] = []
    minority: list[int] = []
    nonfinite: dict[int, int] = {}
    for diff in diffs:
        clusters += diff.clusters
        minority += diff.minority
        nonfinite |= diff.nonfinite

    compared_sets = sets_text(replica_groups.comparable, 3)
    within_groups = Detail.WITHIN_GROUPS(layout=replica_groups.layout, sets=compared_sets)
    return replace(
        worst,
        detail=worst.detail or within_groups,
        replica_groups=replica_groups.sets,
        clusters=tuple(clusters),
        minority=tuple(sorted(minority)),
        nonfinite=dict(sorted(nonfinite.items())),
    )


def _measure_clusters(
    bare: TensorDiff, tensors: Mapping[int, Tensor], clusters: Sequence[Sequence[int]], method: ComparisonMethod
) -> TensorDiff:
    """Return the diff of replicas with different bytes. clusters: of positions in `tensors`."""
    from syncheck.tensors.differences import measure_differences  # needs numpy

    replicas = list(tensors.values())
    tolerance = method.tolerance
    sets = _name_ranks(clusters, tuple(tensors))
    has_majority = bool(minority_of(sets))
    statistics = measure_differences(
        [replicas[positions[0]] for positions in clusters],
        method.files,
        tolerance,
        majority=has_majority,
    )
    status: Status = "different"
    if not statistics.mismatched:
        status = "equal"
    elif not tolerance.exact and not statistics.beyond:
        status = "close"

    return with_clusters(
        bare,
        tensors,
        sets,
        status=status,
        tolerance=str(tolerance) if status == "close" else None,
        mismatched=statistics.mismatched,
        nonfinite=_spread_over_ranks(sets, statistics.nonfinite),
        extent=statistics.extent(bare.numel),
        **statistics.size(bare.shape),
    )


def _name_ranks(clusters: Iterable[Iterable[int]], ranks: Sequence[int]) -> Sets:
    """Return clusters of ranks. clusters: of positions in `ranks`."""
    named_clusters: list[tuple[int, ...]] = []
    for positions in clusters:
        named_clusters.append(tuple(ranks[position] for position in positions))

    return tuple(named_clusters)


def _spread_over_ranks(sets: Sets, counts: Iterable[int | None]) -> dict[int, int]:
    """Return a count for each rank. counts: one for each set; None if it is unknown."""
    by_rank: dict[int, int] = {}
    for ranks, count in zip(sets, counts, strict=False):
        if count is not None:
            by_rank |= dict.fromkeys(ranks, count)

    return dict(sorted(by_rank.items()))


def _compare_without_bytes(members: Sequence[Tensor], method: ComparisonMethod) -> DigestResult | None:
    """Compare digests if a replica is a fingerprint, checksums if `quick`; else return None."""
    fingerprints = [tensor for tensor in members if tensor.digest is not None]
    are_all_fingerprints = len(fingerprints) == len(members)
    # Digests of files are computed from their bytes, which takes longer than to compare checksums.
    if fingerprints and (not method.quick or are_all_fingerprints):
        from syncheck.tensors.digests import compare_digests

        return compare_digests(members, method.files)

    if method.quick and any(tensor.data is None for tensor in members):
        from syncheck.tensors.digests import compare_checksums

        return compare_checksums(members)

    return None


def _describe_digests(bare: TensorDiff, ranks: tuple[int, ...], result: DigestResult) -> TensorDiff | None:
    """Return the diff from digests or checksums; None if all are identical."""
    if len(result.clusters) == 1:
        return None

    if not result.clusters:
        return replace(bare, reason=result.reason, detail=result.detail)

    sets = _name_ranks(result.clusters, ranks)
    nonfinite = _spread_over_ranks(sets, result.nonfinite)
    if len(nonfinite) < len(ranks):
        nonfinite = {}

    numbers = {"mismatched": None, "nonfinite": nonfinite, **result.numbers}
    return with_clusters(
        bare,
        ranks,
        sets,
        status="different",
        reason=result.reason,
        detail=result.detail,
        **numbers,
    )
