"""Compare the replicas of one tensor: presence, shape, dtype, bytes, and the size of differences."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.layout.dtensors import is_whole, layout_text
from syncheck.messages import SHARD_REFUSALS, Detail, Refusal
from syncheck.records import Reason, TensorDiff, largest_first, minority_of
from syncheck.tensors.clustering import cluster_replicas
from syncheck.text import group_ranks, sets_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.layout.replica_groups import ReplicaSets, Sets
    from syncheck.messages import Message
    from syncheck.records import Status
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.digests import DigestResult
    from syncheck.tensors.finiteness import FiniteScan
    from syncheck.tensors.tolerance import Tolerance

    Compare = Callable[[TensorDiff, Mapping[int, Tensor]], TensorDiff | None]

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

    def compare(bare: TensorDiff, members: Mapping[int, Tensor]) -> TensorDiff | None:
        result = _compare_without_bytes(list(members.values()), files, quick=quick)
        if result is not None:
            return _make_diff(bare, tuple(members), result)
        # Replicas of other dtypes than the first one differ from it, so they need no search.
        is_first_dtype = bare.dtype == next(iter(tensors.values())).dtype
        return _compare_bytes(bare, members, files, tolerance, scan if is_first_dtype else None)

    missing = tuple(rank for rank in replica_sets.expected if rank not in tensors)
    bare = _bare(name, kind, tensors)
    diff = _find_mismatch(bare, tensors, replica_sets)
    if diff is None:
        diff = _compare_groups(bare, tensors, replica_sets, compare)
    elif values := _compare_matching(diff, tensors, replica_sets, compare):
        # A tensor refused by the reader on some ranks is not a difference by itself.
        diff = replace(diff, facts=(diff, values)) if diff.out_of_sync else replace(values, detail=diff.detail)
    if not missing:
        return diff
    if sharded and diff is None and len(tensors) > 1:
        return None  # all ranks with the tensor agree
    if sharded and (diff is None or diff.reason is Reason.SHARDED):
        return replace(bare, reason=Reason.SHARDED, detail=Detail.PARTITIONED(ranks=tuple(tensors)))
    absent = replace(
        _with_clusters(bare, replica_sets.expected, largest_first((list(tensors), missing))),
        reason=Reason.MISSING,
        detail=Detail.MISSING(ranks=missing),
        clusters=(tuple(tensors),),
    )
    if diff is None:
        return absent
    clustered = {rank for cluster in diff.clusters for rank in cluster}
    unclustered = tuple(rank for rank in tensors if rank not in clustered)
    return replace(
        diff,
        status="different" if diff.status == "different" else "not_compared",
        reason=absent.reason,
        detail=absent.detail,
        replica_groups=absent.replica_groups,
        clusters=(*diff.clusters, unclustered) if unclustered else diff.clusters,
        minority=diff.minority or absent.minority,
        facts=(absent, *(diff.facts or (diff,))) if diff.out_of_sync else (),
    )


def skip_tensor(name: str, kind: str, tensors: Mapping[int, Tensor], reason: Reason, detail: Message) -> TensorDiff:
    """Return the diff of a tensor that is not compared. reason: other than its shapes and dtypes."""
    return replace(_bare(name, kind, tensors), reason=reason, detail=detail)


def _bare(name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff:
    first = next(iter(tensors.values()))
    return TensorDiff(name, kind, first.dtype, first.shape, "not_compared", numel=first.numel)


def _with_clusters(bare: TensorDiff, ranks: Iterable[int], sets: Sets, **changes: Any) -> TensorDiff:
    """Return the diff of one replica group. sets: ranks with equal values, largest first."""
    return replace(bare, replica_groups=(tuple(ranks),), clusters=sets, minority=minority_of(sets), **changes)


def _find_mismatch(bare: TensorDiff, tensors: Mapping[int, Tensor], replica_sets: ReplicaSets) -> TensorDiff | None:
    """Return a diff if the values cannot be compared: different shapes, dtypes or layouts, or refused by the reader."""
    # The common case first. A loop takes half the time of any() with a generator.
    for t in tensors.values():
        if t.shape != bare.shape or t.dtype != bare.dtype or t.refused or t.sharding is not None:
            break
    else:
        return None
    refusals = {rank: tensor.refused for rank, tensor in tensors.items()}
    sharded = {rank: refusal for rank, refusal in refusals.items() if refusal and refusal.code in SHARD_REFUSALS}
    if sharded:
        first = next(iter(sharded.values()))
        if len(sharded) == len(tensors):  # shards of one tensor may have different shapes
            return replace(bare, reason=Reason.SHARDED, detail=Detail.REFUSED(refusal=first))
        detail = Detail.REFUSED_ON_SOME(refusal=first, ranks=tuple(sharded))
        return replace(bare, reason=Reason.REFUSED, detail=detail)
    # For example, a sparse and a dense tensor, or a meta tensor and a tensor with values. As text, because fingerprints
    # store the text of a refusal.
    kinds = {rank: str(r) if r else f"{tensors[rank].dtype} with values" for rank, r in refusals.items()}
    if any(refusals.values()) and len(set(kinds.values())) > 1:
        return _make_mismatch(bare, Reason.DTYPE, kinds, tensors)
    for field in (Reason.SHAPE, Reason.DTYPE):
        values = {rank: _known_value(tensor, field) for rank, tensor in tensors.items()}
        if None not in values.values() and len(set(values.values())) > 1:
            if (
                field is Reason.SHAPE
                and replica_sets.kind == "model parallel"
                and _is_equal_within(values, replica_sets)
            ):
                continue  # uneven parts of plain tensors
            return _make_mismatch(bare, field, values, tensors)
    parts = {r: t.sharding for r, t in tensors.items() if t.sharding is not None and not is_whole(t.sharding)}
    texts = {id(sharding): layout_text(sharding) for sharding in parts.values()}  # ranks share sharding objects
    layouts = {rank: texts[id(sharding)] for rank, sharding in parts.items()}
    if len(set(layouts.values())) > 1:  # shards of different layouts are never replicas
        return _make_mismatch(bare, Reason.SHAPE, layouts, tensors)
    refused = next(iter(refusals.values()))
    if not refused:
        return None
    reason = Reason.PARTS if refused.code is Refusal.IN_PARTS else Reason.REFUSED
    return replace(bare, reason=reason, detail=Detail.REFUSED(refusal=refused))


def _compare_matching(
    mismatch: TensorDiff, tensors: Mapping[int, Tensor], replica_sets: ReplicaSets, compare: Compare
) -> TensorDiff | None:
    """Compare ranks with the same shape and dtype if not all ranks have the same. Return None if they do not differ."""
    readable = {rank: tensor for rank, tensor in tensors.items() if not tensor.refused}
    sets = []
    for ranks in replica_sets.sets:
        by_type: dict[Any, list[int]] = defaultdict(list)
        for rank in ranks:
            if rank in readable:
                by_type[readable[rank].dtype, readable[rank].shape].append(rank)
        sets += [tuple(members) for members in by_type.values() if len(members) > 1]
    if not sets:
        return None
    matching = replace(replica_sets, sets=tuple(sets), layout=replica_sets.layout or f"of one {mismatch.reason}")
    members = {rank: readable[rank] for ranks in sets for rank in ranks}
    diff = _compare_groups(_bare(mismatch.name, mismatch.kind, members), members, matching, compare)
    return diff if diff is not None and diff.out_of_sync else None


def _is_equal_within(values: Mapping[int, Any], replica_sets: ReplicaSets) -> bool:
    """Whether the values are equal within each replica group."""
    return all(len({values[rank] for rank in ranks}) == 1 for ranks in replica_sets.sets)


def _known_value(tensor: Tensor, field: Reason) -> Any:
    """Return the global shape or the dtype of a tensor; None if the reader does not know it."""
    value: Any = tensor.sharding.shape if field is Reason.SHAPE and tensor.sharding else getattr(tensor, field)
    unknown = tensor.refused and tensor.dtype == "unknown" and value in ((), "unknown")
    return None if unknown else value


def _make_mismatch(
    bare: TensorDiff, reason: Reason, values: Mapping[int, Any], tensors: Mapping[int, Tensor]
) -> TensorDiff:
    """Return a diff of values by rank: shapes, dtypes or layouts."""
    by_value = group_ranks(values)
    sets = largest_first(by_value.values())
    value_of = {tuple(ranks): value for value, ranks in by_value.items()}
    detail = Detail.UNEQUAL(values=tuple((value_of[ranks], ranks) for ranks in sets))
    return _with_clusters(bare, tensors, sets, reason=reason, detail=detail)


def _compare_groups(
    bare: TensorDiff, tensors: Mapping[int, Tensor], replica_sets: ReplicaSets, compare: Compare
) -> TensorDiff | None:
    """Compare within each replica group. Return None if all are identical, else the numbers of the worst group."""
    if replica_sets.kind and not replica_sets.comparable:
        return replace(bare, reason=Reason.SHARDED, detail=Detail.SHARDED(layout=replica_sets.layout))
    diffs = []
    for ranks in replica_sets.comparable:
        is_only = len(ranks) == len(tensors)
        members = tensors if is_only else {rank: tensors[rank] for rank in ranks}
        own = bare if is_only else _bare(bare.name, bare.kind, members)
        # torch writes equal shapes for equal mesh coordinates, but untrusted files may not.
        if any(tensor.shape != own.shape for tensor in members.values()):
            shapes = {rank: tensor.shape for rank, tensor in members.items()}
            diff: TensorDiff | None = _make_mismatch(own, Reason.SHAPE, shapes, members)
        else:
            diff = compare(own, members)
        if diff is not None:
            diffs.append(diff)
    if not diffs or len(replica_sets.sets) == 1:
        return diffs[0] if diffs else None
    worst = max(diffs, key=lambda diff: (_ORDER.index(diff.status), diff.max_abs or 0))
    return replace(
        worst,
        detail=worst.detail
        or Detail.WITHIN_GROUPS(layout=replica_sets.layout, sets=sets_text(replica_sets.comparable, 3)),
        replica_groups=replica_sets.sets,
        clusters=tuple(cluster for diff in diffs for cluster in diff.clusters),
        minority=tuple(sorted(rank for diff in diffs for rank in diff.minority)),
        nonfinite=dict(sorted((rank, count) for diff in diffs for rank, count in diff.nonfinite.items())),
    )


def _compare_bytes(
    bare: TensorDiff, tensors: Mapping[int, Tensor], files: Files, tolerance: Tolerance, scan: FiniteScan | None
) -> TensorDiff | None:
    """Compare replicas bitwise and measure the differences. Return None if all are identical."""
    ranks, members = tuple(tensors), list(tensors.values())
    clusters = cluster_replicas(members, files, scan) if len(members) > 1 else ((0,),)
    if len(clusters) == 1:
        return None
    from syncheck.tensors.differences import measure_differences  # needs numpy

    sets: Sets = tuple(tuple(ranks[i] for i in positions) for positions in clusters)
    representatives = [members[positions[0]] for positions in clusters]
    statistics = measure_differences(representatives, files, tolerance, majority=bool(minority_of(sets)))
    tolerated = not tolerance.exact and not statistics.beyond
    status: Status = "equal" if not statistics.mismatched else "close" if tolerated else "different"
    nonfinite = {rank: count for same, count in zip(sets, statistics.nonfinite, strict=True) for rank in same}
    return _with_clusters(
        bare,
        ranks,
        sets,
        status=status,
        tolerance=str(tolerance) if status == "close" else None,
        mismatched=statistics.mismatched,
        nonfinite=dict(sorted(nonfinite.items())),
        extent=statistics.extent(bare.numel),
        **statistics.size(bare.shape),
    )


def _compare_without_bytes(members: Sequence[Tensor], files: Files, *, quick: bool) -> DigestResult | None:
    """Compare digests if a replica is a fingerprint, checksums if `quick`; else return None."""
    fingerprints = sum(tensor.digest is not None for tensor in members)
    if fingerprints and (not quick or fingerprints == len(members)):
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
    sets: Sets = tuple(tuple(ranks[i] for i in positions) for positions in result.clusters)
    counts = {rank: n for same, n in zip(sets, result.nonfinite, strict=False) for rank in same if n is not None}
    nonfinite = dict(sorted(counts.items())) if len(counts) == len(ranks) else {}
    numbers = {"mismatched": None, "nonfinite": nonfinite, **result.numbers}
    return _with_clusters(bare, ranks, sets, status="different", reason=result.reason, detail=result.detail, **numbers)
