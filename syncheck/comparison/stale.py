"""Detect stale ranks: their tensors equal the other ranks' tensors at an earlier step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import CheckpointError
from syncheck.layout.alignment import align
from syncheck.layout.groups import group_by_step
from syncheck.records import Unreadable
from syncheck.tensors.blocks import Files
from syncheck.tensors.clustering import cluster_replicas

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Tensor

# Kinds that a step updates equally on all ranks. Running statistics differ between ranks without a fault.
_KINDS = ("parameter", "optimizer", "optimizer_step")
# Maximum number of earlier steps, from the latest.
MOST_STEPS = 50


def add_stale_ranks(
    compared: Sequence[tuple[Comparison, ReplicaGroup]], unreadable: list[Unreadable], jobs: int | None, *, quick: bool
) -> list[Comparison]:
    """Add the stale ranks of each group to its evidence.

    compared: groups with their files. quick: compare stored checksums only. Files that cannot be read any more are
    added to `unreadable`.
    """
    runs = group_by_step(replicas for _, replicas in compared)
    groups = []
    for group, now in compared:
        step = now.step
        earlier = [] if step is None else [(s, r) for s, r in runs[now.run].items() if s < step]
        try:
            stale = _find_stale_ranks(group, now, earlier, jobs, quick=quick)
        except CheckpointError as error:  # from this step or from an earlier step
            unreadable.append(Unreadable(error.path, error.reason))
            stale = {}
        groups.append(replace(group, evidence=replace(group.evidence, stale=stale)) if stale else group)
    return groups


def _find_stale_ranks(
    group: Comparison, now: ReplicaGroup, earlier: Sequence[tuple[int, ReplicaGroup]], jobs: int | None, *, quick: bool
) -> dict[int, int]:
    """Return stale ranks with the latest step whose parameters and optimizer state they hold.

    A rank is stale if all of its tensors that differ are bitwise equal to another rank's tensors at that step. now: the
    files of the group. earlier: the files of earlier steps of the run, in order. Raises CheckpointError if a file can
    no longer be read.
    """
    differing = [diff for diff in group.tensors if diff.kind in _KINDS and diff.status == "different"]
    if not earlier or not any(diff.kind == "parameter" for diff in differing):
        return {}
    odd = {rank for diff in differing for rank in diff.minority} or set(group.ranks)
    current = align(dict(now.ranks)).tensors
    stale: dict[int, int] = {}
    with Files(jobs=jobs) as files:
        for step, replicas in reversed(earlier[-MOST_STEPS:]):
            suspects = sorted(odd - stale.keys())
            if not suspects:
                break
            before = align(dict(replicas.ranks)).tensors
            for rank in suspects:
                # One rank of the majority represents it. Without a majority, take any other rank.
                if len(odd) == len(now.ranks):
                    sources = {source for source, _ in replicas.ranks if source != rank}
                else:
                    sources = {source for source, _ in replicas.ranks if source not in odd}
                if _equals_earlier(rank, current, before, sources, differing, None if quick else files):
                    stale[rank] = step
    # If all ranks match earlier steps, no rank is behind other ranks.
    return stale if len(stale) < len(now.ranks) else {}


def _equals_earlier(
    rank: int,
    current: Mapping[str, Mapping[int, Tensor]],
    before: Mapping[str, Mapping[int, Tensor]],
    sources: Collection[int],
    differing: Sequence[TensorDiff],
    files: Files | None,
) -> bool:
    """Whether all differing tensors of a rank equal those of a replica at an earlier step. Usually the first decides.

    current, before: the tensors of both steps by name and rank.
    sources: the ranks whose tensors count at the earlier step.
    files: None to compare stored checksums and digests only.
    """
    has_tensors = False
    for diff in differing:
        if not any(rank in ranks for ranks in diff.clusters):
            continue
        has_tensors = True
        tensor = current.get(diff.name, {}).get(rank)
        earlier = _find_replica(diff, rank, before.get(diff.name, {}), sources)
        if tensor is None or earlier is None or not _are_equal(tensor, earlier, files):
            return False
    return has_tensors


def _find_replica(
    diff: TensorDiff, rank: int, tensors: Mapping[int, Tensor], sources: Collection[int]
) -> Tensor | None:
    """Return the tensor of the first rank in the replica group of a rank; None if no rank there holds it."""
    for ranks in diff.replica_groups:
        if rank not in ranks:
            continue
        for source in ranks:
            if source in sources and source in tensors:
                return tensors[source]
        break
    return None


def _are_equal(mine: Tensor, theirs: Tensor, files: Files | None) -> bool:
    """Whether two tensors are bitwise equal. files: None to compare stored checksums and digests only."""
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape) or mine.refused or theirs.refused:
        return False
    if mine.digest is not None and theirs.digest is not None:
        return (mine.digest.algorithm, mine.digest.value) == (theirs.digest.algorithm, theirs.digest.value)
    if files is None:
        from syncheck.tensors.digests import compare_checksums

        return mine.digest is theirs.digest and compare_checksums((mine, theirs)).clusters == ((0, 1),)
    return mine.digest is theirs.digest and len(cluster_replicas((mine, theirs), files)) == 1
