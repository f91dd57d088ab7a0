"""Compare the replicas of one tensor: present everywhere, alike, of equal bytes, and if not, by how much."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.comparison.replica_groups import format_sets, is_whole, layout_text
from syncheck.kernel.clustering import cluster_replicas
from syncheck.messages import SHARD_REFUSALS, Detail, ranks_text
from syncheck.records import Reason, TensorDiff
from syncheck.snapshots import index_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.comparison.replica_groups import Division, Sets
    from syncheck.kernel.blocks import Files
    from syncheck.kernel.digests import DigestResult
    from syncheck.records import Status
    from syncheck.snapshots import Tensor
    from syncheck.tolerance import Tolerance

    Compare = Callable[[TensorDiff, Mapping[int, Tensor]], TensorDiff | None]

_MOST_SETS = 6  # of ranks named in a detail
# From what says least of a difference to what says most.
_ORDER: tuple[Status, ...] = ("identical", "equal", "close", "not_compared", "different")


def compare_tensor(
    name: str,
    kind: str,
    tensors: Mapping[int, Tensor],
    division: Division,
    files: Files,
    tolerance: Tolerance,
    *,
    sharded: bool,
    quick: bool,
) -> TensorDiff | None:
    """Compare one tensor's replicas by rank, within each replica group; None when they are identical.

    division: these groups, and the ranks that ought to have the tensor. sharded: whether each rank was to hold other
    tensors than the rest, so that one that is not everywhere is as it should be. quick: compare stored checksums and
    read nothing. Raises CheckpointError when a file can no longer be read.
    """

    def compare(bare: TensorDiff, members: Mapping[int, Tensor]) -> TensorDiff | None:
        told = _told(list(members.values()), files, quick=quick)
        return _as_told(bare, tuple(members), told) if told else _by_bytes(bare, members, files, tolerance)

    missing = tuple(rank for rank in division.expected if rank not in tensors)
    bare = _bare(name, kind, tensors)
    diff = _unlike(bare, tensors, division)
    if diff is None:
        diff = _by_groups(bare, tensors, division, compare)
    elif values := _among_alike(diff, tensors, division, compare):
        # What the reader refuses on some ranks is no difference by itself.
        diff = replace(diff, facts=(diff, values)) if diff.out_of_sync else replace(values, detail=diff.detail)
    if not missing:
        return diff
    if sharded and diff is None and len(tensors) > 1:
        return None  # the ranks that hold it agree
    if sharded and (diff is None or diff.reason is Reason.SHARDED):
        return replace(bare, reason=Reason.SHARDED, detail=Detail.PARTITIONED(ranks=tuple(tensors)))
    alone = replace(
        bare,
        reason=Reason.MISSING,
        detail=Detail.MISSING(ranks=missing),
        replica_groups=(division.expected,),
        clusters=(tuple(tensors),),
        minority=minority_of(_largest_first((list(tensors), list(missing)))),
    )
    if diff is None:
        return alone
    told = {rank for found in diff.clusters for rank in found}
    untold = tuple(rank for rank in tensors if rank not in told)
    return replace(
        diff,
        status="different" if diff.status == "different" else "not_compared",
        reason=alone.reason,
        detail=alone.detail,
        replica_groups=alone.replica_groups,
        clusters=(*diff.clusters, untold) if untold else diff.clusters,
        minority=diff.minority or alone.minority,
        facts=(alone, *(diff.facts or (diff,))) if diff.out_of_sync else (),
    )


def skip_by_design(name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff:
    """Count a random number state, or PowerSGD's error, which differ between ranks by design, as not compared."""
    what = "PowerSGD's errors" if ".error_dict." in f".{name}" else "random number states"
    return replace(_bare(name, kind, tensors), reason=Reason.RNG, detail=Detail.BY_DESIGN(what=what))


def mark_ambiguous(name: str, kind: str, tensors: Mapping[int, Tensor], why: str) -> TensorDiff:
    """Count a tensor of which nothing in the files says which ranks must hold the same bytes."""
    return replace(_bare(name, kind, tensors), reason=Reason.AMBIGUOUS, detail=Detail.AMBIGUOUS(why=why))


def minority_of(sets: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks outside the largest set; none where two sets are the largest. sets: largest first."""
    if len(sets) < 2 or len(sets[0]) == len(sets[1]):
        return ()
    return tuple(sorted(rank for found in sets[1:] for rank in found))


def _bare(name: str, kind: str, tensors: Mapping[int, Tensor]) -> TensorDiff:
    first = next(iter(tensors.values()))
    return TensorDiff(name, kind, first.dtype, first.shape, "not_compared", numel=first.numel)


def _unlike(bare: TensorDiff, tensors: Mapping[int, Tensor], division: Division) -> TensorDiff | None:
    """Say why replicas cannot be compared by value: of another kind, shape or dtype, or refused by the reader."""
    # Nearly always they can, so this comes first, and as a loop: a generator in any() takes twice as long.
    for t in tensors.values():
        if t.shape != bare.shape or t.dtype != bare.dtype or t.refused or t.sharding is not None:
            break
    else:
        return None
    refusals = {rank: tensor.refused for rank, tensor in tensors.items()}
    sharded = {rank: refusal for rank, refusal in refusals.items() if refusal and refusal.code in SHARD_REFUSALS}
    if sharded:
        first = next(iter(sharded.values()))
        if len(sharded) == len(tensors):  # shards of one tensor may have any shapes
            return replace(bare, reason=Reason.SHARDED, detail=Detail.REFUSED(refusal=first))
        detail = Detail.REFUSED_ON_SOME(refusal=first, ranks=tuple(sharded))
        return replace(bare, reason=Reason.REFUSED, detail=detail)
    # A sparse tensor beside a dense one, or one without values beside one that has them: these are not the same.
    kinds: dict[int, Any] = {rank: r or f"{tensors[rank].dtype} with values" for rank, r in refusals.items()}
    if any(refusals.values()) and len(set(refusals.values())) > 1:
        return _split(bare, Reason.DTYPE, kinds, tensors)
    for what in (Reason.SHAPE, Reason.DTYPE):
        found = {rank: _known(tensor, what) for rank, tensor in tensors.items()}
        if None not in found.values() and len(set(found.values())) > 1:
            if what is Reason.SHAPE and division.kind == "model parallel" and _alike_within(found, division):
                continue  # parts of plain tensors, too, may be of unequal sizes
            return _split(bare, what, found, tensors)
    parts = {r: t.sharding for r, t in tensors.items() if t.sharding is not None and not is_whole(t.sharding)}
    texts = {id(sharding): layout_text(sharding) for sharding in parts.values()}  # ranks of a job share one
    layouts = {rank: texts[id(sharding)] for rank, sharding in parts.items()}
    if len(set(layouts.values())) > 1:  # no rank's part is another's then, and the rest of the model would hide it
        return _split(bare, Reason.SHAPE, layouts, tensors)
    refused = next(iter(refusals.values()))
    return replace(bare, reason=Reason.REFUSED, detail=Detail.REFUSED(refusal=refused)) if refused else None


def _among_alike(
    unlike: TensorDiff, tensors: Mapping[int, Tensor], division: Division, compare: Compare
) -> TensorDiff | None:
    """Compare the ranks that hold a tensor alike, where not all do; None when these do not differ."""
    plain = {rank: tensor for rank, tensor in tensors.items() if not tensor.refused}
    sets = []
    for ranks in division.sets:
        by_form: dict[Any, list[int]] = defaultdict(list)
        for rank in ranks:
            if rank in plain:
                by_form[plain[rank].dtype, plain[rank].shape].append(rank)
        sets += [tuple(found) for found in by_form.values() if len(found) > 1]
    if not sets:
        return None
    among = replace(division, sets=tuple(sets), layout=division.layout or f"of one {unlike.reason}")
    first = {rank: plain[rank] for found in sets for rank in found}
    diff = _by_groups(_bare(unlike.name, unlike.kind, first), first, among, compare)
    return diff if diff is not None and diff.out_of_sync else None


def _alike_within(found: Mapping[int, Any], division: Division) -> bool:
    """Whether all ranks of each replica group have the same."""
    return all(len({found[rank] for rank in ranks}) == 1 for ranks in division.sets)


def _known(tensor: Tensor, what: Reason) -> Any:
    """Return a tensor's shape, the whole one of a DTensor, or dtype; None where the reader could not tell."""
    found: Any = tensor.sharding.shape if what is Reason.SHAPE and tensor.sharding else getattr(tensor, what)
    return None if tensor.refused and found in ((), "unknown") else found


def _split(bare: TensorDiff, what: Reason, found: Mapping[int, Any], tensors: Mapping[int, Tensor]) -> TensorDiff:
    """Return a difference in what is not compared by value, with the ranks that have each."""
    by_text: dict[Any, list[int]] = defaultdict(list)
    for rank, value in found.items():
        by_text[value].append(rank)
    sets = _largest_first(by_text.values())
    texts = {tuple(ranks): list(text) if isinstance(text, tuple) else text for text, ranks in by_text.items()}
    shown = " and ".join(f"{texts[ranks]} on {ranks_text(ranks)}" for ranks in sets[:_MOST_SETS])
    more = f" and {len(sets) - _MOST_SETS} more" if len(sets) > _MOST_SETS else ""
    return replace(
        bare,
        reason=what,
        detail=Detail.UNEQUAL(sets=shown + more),
        replica_groups=(tuple(tensors),),
        clusters=sets,
        minority=minority_of(sets),
    )


def _by_groups(
    bare: TensorDiff, tensors: Mapping[int, Tensor], division: Division, compare: Compare
) -> TensorDiff | None:
    """Compare within each replica group; None when all are identical. Of several groups the worst gives the numbers."""
    if division.kind and not division.comparable:
        return replace(bare, reason=Reason.SHARDED, detail=Detail.SHARDED(layout=division.layout))
    diffs = []
    for ranks in division.comparable:
        alone = len(ranks) == len(tensors)
        members = tensors if alone else {rank: tensors[rank] for rank in ranks}
        own = bare if alone else _bare(bare.name, bare.kind, members)
        # Shards of one place in the mesh have one shape as torch writes them, but a file may hold anything.
        if any(tensor.shape != own.shape for tensor in members.values()):
            shapes = {rank: tensor.shape for rank, tensor in members.items()}
            diff: TensorDiff | None = _split(own, Reason.SHAPE, shapes, members)
        else:
            diff = compare(own, members)
        if diff is not None:
            diffs.append(diff)
    if not diffs or len(division.sets) == 1:
        return diffs[0] if diffs else None
    worst = max(diffs, key=lambda diff: (_ORDER.index(diff.status), diff.max_abs or 0))
    return replace(
        worst,
        detail=worst.detail or Detail.WITHIN_GROUPS(layout=division.layout, sets=format_sets(division.comparable)),
        replica_groups=division.sets,
        clusters=tuple(found for diff in diffs for found in diff.clusters),
        minority=tuple(sorted(rank for diff in diffs for rank in diff.minority)),
        nonfinite=dict(sorted((rank, count) for diff in diffs for rank, count in diff.nonfinite.items())),
    )


def _by_bytes(bare: TensorDiff, tensors: Mapping[int, Tensor], files: Files, tolerance: Tolerance) -> TensorDiff | None:
    """Sort replicas by their bytes and measure what differs; None when all are identical."""
    ranks, members = tuple(tensors), list(tensors.values())
    found = cluster_replicas(members, files) if len(members) > 1 else ((0,),)
    if len(found) == 1:
        return None
    from syncheck.differences.measurement import (
        measure_differences,  # numpy is imported here, where there is a difference to measure
    )

    sets: Sets = tuple(tuple(ranks[i] for i in positions) for positions in found)
    minority = minority_of(sets)
    gaps = measure_differences(
        [members[positions[0]] for positions in found], files, tolerance, majority=bool(minority)
    )
    excused = not tolerance.exact and not gaps.beyond
    status: Status = "equal" if not gaps.mismatched else "close" if excused else "different"
    nonfinite = {rank: count for same, count in zip(sets, gaps.nonfinite, strict=True) for rank in same}
    return replace(
        bare,
        status=status,
        tolerance=str(tolerance) if status == "close" else None,
        replica_groups=(ranks,),
        clusters=sets,
        minority=minority,
        mismatched=gaps.mismatched,
        max_abs=gaps.max_abs,
        max_rel=gaps.max_rel,
        max_ulp=gaps.max_ulp,
        index=None if gaps.worst is None else index_at(gaps.worst, bare.shape),
        nonfinite=dict(sorted(nonfinite.items())),
        extent=gaps.extent(bare.numel),
    )


def _told(members: Sequence[Tensor], files: Files, *, quick: bool) -> DigestResult | None:
    """Ask what stands for the bytes, where these are not there or not to be read; None where they are."""
    fingerprints = sum(tensor.digest is not None for tensor in members)
    if fingerprints and (not quick or fingerprints == len(members)):
        from syncheck.kernel.digests import compare_digests

        return compare_digests(members, files)
    if quick and any(tensor.data is None for tensor in members):
        from syncheck.kernel.checksums import compare_checksums

        return compare_checksums(members)
    return None


def _as_told(bare: TensorDiff, ranks: tuple[int, ...], told: DigestResult) -> TensorDiff | None:
    """Return what is known of replicas without their bytes; None when all are identical."""
    if len(told.clusters) == 1:
        return None
    if not told.clusters:
        return replace(bare, reason=told.reason, detail=told.detail)
    sets: Sets = tuple(tuple(ranks[i] for i in positions) for positions in told.clusters)
    counts = {rank: n for same, n in zip(sets, told.nonfinite, strict=False) for rank in same if n is not None}
    known = replace(
        bare,
        status="different",
        reason=told.reason,
        detail=told.detail,
        replica_groups=(ranks,),
        clusters=sets,
        minority=minority_of(sets),
        mismatched=None,
        nonfinite=dict(sorted(counts.items())) if len(counts) == len(ranks) else {},
    )
    return replace(known, **told.numbers)


def _largest_first(sets: Iterable[list[int]]) -> Sets:
    return tuple(tuple(found) for found in sorted(sets, key=lambda found: (-len(found), found[0])))
