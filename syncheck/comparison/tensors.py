"""Compare the replicas of one tensor: presence, shape, dtype, bytes, and the size of differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from syncheck.comparison.mismatches import find_mismatch, find_unequal, make_bare_diff, with_clusters
from syncheck.messages import Detail
from syncheck.records import Reason, largest_first, minority_of
from syncheck.tensors.clustering import cluster_replicas
from syncheck.text import sets_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.replica_groups import ReplicaSets, Sets
    from syncheck.records import Status, TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.digests import DigestResult
    from syncheck.tensors.finiteness import FiniteScan
    from syncheck.tensors.tolerance import Tolerance

# From the weakest to the strongest result.
_ORDER: tuple[Status, ...] = ("identical", "equal", "close", "not_compared", "different")


def compare_tensor(
    name: str,
    kind: str,
    tensors: Mapping[int, Tensor],
    replica_sets: ReplicaSets,
    files: Files,
    tolerance: Tolerance,
    *,
    sharded: bool,
    quick: bool,
    scan: FiniteScan | None = None,
) -> TensorDiff | None:
    """Compare the replicas of one tensor within each replica group. Return None if they are identical.

    tensors: by rank.
    replica_sets: the replica groups and the ranks required to have the tensor.
    sharded: whether each rank holds different tensors by design, so missing tensors are no difference.
    quick: compare stored checksums only.
    scan: searches the bytes that are read for NaN and infinity.
    Raises CheckpointError if a file can no longer be read.
    """
    bare = make_bare_diff(name, kind, tensors)
    compare = _Compare(
        files,
        tolerance,
        tensors,
        scan,
        quick=quick,
    )
    diff = find_mismatch(bare, tensors, replica_sets)
    if diff is None:
        diff = _compare_sets(
            bare,
            tensors,
            replica_sets,
            compare,
        )
    else:
        # Ranks with equal shapes and dtypes can still be compared with each other.
        values = _compare_matching(diff, tensors, replica_sets, compare)
        diff = _add_values(diff, values)

    # Ranks of other pipeline stages or experts do not need the tensor.
    missing_ranks = tuple(rank for rank in replica_sets.expected if rank not in tensors)
    if not missing_ranks:
        return diff

    present_ranks = tuple(tensors)
    if sharded and (diff is None or diff.reason is Reason.SHARDED):
        if diff is None and len(present_ranks) > 1:
            return None  # all ranks with the tensor agree

        return replace(
            bare,
            reason=Reason.SHARDED,
            detail=Detail.PARTITIONED(ranks=present_ranks),
        )

    missing = _make_missing(
        bare,
        present_ranks,
        replica_sets.expected,
        missing_ranks,
    )
    return missing if diff is None else _add_missing(diff, missing, present_ranks)


class _Compare:
    """Compares the replicas of one set.

    files: open files.
    tolerance: of the tensor.
    tensors: the tensor on all ranks.
    scan: searches the bytes that are read.
    quick: compare stored checksums only.
    """

    def __init__(
        self,
        files: Files,
        tolerance: Tolerance,
        tensors: Mapping[int, Tensor],
        scan: FiniteScan | None,
        *,
        quick: bool,
    ) -> None:
        self._files = files
        self._tolerance = tolerance
        self._first_dtype = next(iter(tensors.values())).dtype
        self._scan = scan
        self._quick = quick

    def __call__(self, bare: TensorDiff, members: Mapping[int, Tensor]) -> TensorDiff | None:
        """Return the diff of the members of a replica set; None if they are identical."""
        tensors = list(members.values())
        result = _compare_without_bytes(tensors, self._files, quick=self._quick)
        if result is not None:
            return _make_diff(bare, tuple(members), result)

        # Replicas of other dtypes than the first one differ from it, so they need no search.
        scan = self._scan if bare.dtype == self._first_dtype else None
        return _compare_bytes(
            bare,
            members,
            self._files,
            self._tolerance,
            scan,
        )


def _add_values(mismatch: TensorDiff, values: TensorDiff | None) -> TensorDiff:
    """Return the mismatch of a tensor together with the differences of its values.

    values: the diff of the ranks whose values can be compared; None if they are equal.
    """
    if values is None:
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


def _add_missing(diff: TensorDiff, missing: TensorDiff, present: tuple[int, ...]) -> TensorDiff:
    """Return the diff of a tensor that differs, and that some ranks lack. present: the ranks that have it."""
    clustered = set[int]().union(*diff.clusters)
    # Ranks of replica sets without a difference are in no cluster yet.
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


def _compare_matching(
    mismatch: TensorDiff, tensors: Mapping[int, Tensor], replica_sets: ReplicaSets, compare: _Compare
) -> TensorDiff | None:
    """Compare ranks with the same shape and dtype if not all ranks have the same. Return None if they do not differ."""
    matching_sets: list[tuple[int, ...]] = []
    for ranks in replica_sets.sets:
        matching_sets += _group_by_type(tensors, ranks)

    if not matching_sets:
        return None

    members = {rank: tensors[rank] for rank in chain.from_iterable(matching_sets)}
    matching = replace(
        replica_sets,
        sets=tuple(matching_sets),
        layout=replica_sets.layout or f"of one {mismatch.reason}",
    )
    bare = make_bare_diff(mismatch.name, mismatch.kind, members)
    diff = _compare_sets(
        bare,
        members,
        matching,
        compare,
    )
    if diff is None or not diff.out_of_sync:
        return None

    return diff


def _group_by_type(tensors: Mapping[int, Tensor], ranks: Iterable[int]) -> list[tuple[int, ...]]:
    """Return the sets of several ranks whose tensors can be read and have the same dtype and shape."""
    by_type: dict[Any, list[int]] = defaultdict(list)
    for rank in ranks:
        tensor = tensors[rank]
        if not tensor.refused:
            by_type[tensor.dtype, tensor.shape].append(rank)

    return [tuple(matching_ranks) for matching_ranks in by_type.values() if len(matching_ranks) > 1]


def _compare_sets(
    bare: TensorDiff, tensors: Mapping[int, Tensor], replica_sets: ReplicaSets, compare: _Compare
) -> TensorDiff | None:
    """Compare within each replica set. Return None if all are identical, else the numbers of the worst set."""
    if replica_sets.kind and not replica_sets.comparable:
        detail = Detail.SHARDED(layout=replica_sets.layout)
        return replace(bare, reason=Reason.SHARDED, detail=detail)

    diffs: list[TensorDiff] = []
    for ranks in replica_sets.comparable:
        diff = _compare_set(
            bare,
            tensors,
            ranks,
            compare,
        )
        if diff is not None:
            diffs.append(diff)

    if not diffs:
        return None

    if len(replica_sets.sets) == 1:
        return diffs[0]

    return _join_diffs(diffs, replica_sets)


def _compare_set(
    bare: TensorDiff, tensors: Mapping[int, Tensor], ranks: tuple[int, ...], compare: _Compare
) -> TensorDiff | None:
    """Compare within one replica set. ranks: of the set."""
    if len(ranks) < len(tensors):
        tensors = {rank: tensors[rank] for rank in ranks}
        bare = make_bare_diff(bare.name, bare.kind, tensors)

    # torch writes equal shapes for equal mesh coordinates, but untrusted files may not.
    shapes = {rank: tensor.shape for rank, tensor in tensors.items()}
    mismatch = find_unequal(
        bare,
        Reason.SHAPE,
        shapes,
        tensors,
    )
    return compare(bare, tensors) if mismatch is None else mismatch


def _rank_by_difference(diff: TensorDiff) -> tuple[int, float]:
    """Return a sort key: by the status, then by the size of the difference."""
    return _ORDER.index(diff.status), diff.max_abs or 0


def _join_diffs(diffs: Sequence[TensorDiff], replica_sets: ReplicaSets) -> TensorDiff:
    """Return one diff of several replica sets, with the numbers of the worst set."""
    # The numbers of several sets have no common reference, so those of the worst set stand for all.
    worst = max(diffs, key=_rank_by_difference)
    clusters: list[tuple[int, ...]] = []
    minority: list[int] = []
    nonfinite: dict[int, int] = {}
    for diff in diffs:
        clusters += diff.clusters
        minority += diff.minority
        nonfinite |= diff.nonfinite

    compared_sets = sets_text(replica_sets.comparable, 3)
    within_groups = Detail.WITHIN_GROUPS(layout=replica_sets.layout, sets=compared_sets)
    return replace(
        worst,
        detail=worst.detail or within_groups,
        replica_groups=replica_sets.sets,
        clusters=tuple(clusters),
        minority=tuple(sorted(minority)),
        nonfinite=dict(sorted(nonfinite.items())),
    )


def _compare_bytes(
    bare: TensorDiff, tensors: Mapping[int, Tensor], files: Files, tolerance: Tolerance, scan: FiniteScan | None
) -> TensorDiff | None:
    """Compare replicas bitwise and measure the differences. Return None if all are identical."""
    members = list(tensors.values())
    clusters = cluster_replicas(members, files, scan)
    if len(clusters) == 1:
        return None

    from syncheck.tensors.differences import measure_differences  # needs numpy

    sets = _name_ranks(clusters, tuple(tensors))
    has_majority = bool(minority_of(sets))
    statistics = measure_differences(
        [members[positions[0]] for positions in clusters],
        files,
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


def _compare_without_bytes(members: Sequence[Tensor], files: Files, *, quick: bool) -> DigestResult | None:
    """Compare digests if a replica is a fingerprint, checksums if `quick`; else return None."""
    fingerprints = [tensor for tensor in members if tensor.digest is not None]
    are_all_fingerprints = len(fingerprints) == len(members)
    # Digests of files are computed from their bytes, which takes longer than to compare checksums.
    if fingerprints and (not quick or are_all_fingerprints):
        from syncheck.tensors.digests import compare_digests

        return compare_digests(members, files)

    if quick and any(tensor.data is None for tensor in members):
        from syncheck.tensors.digests import compare_checksums

        return compare_checksums(members)

    return None


def _make_diff(bare: TensorDiff, ranks: tuple[int, ...], result: DigestResult) -> TensorDiff | None:
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
