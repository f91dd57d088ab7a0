"""Detect stale ranks: their tensors equal the other ranks' tensors at an earlier step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import CheckpointError
from syncheck.layout.copies import rename_copies
from syncheck.layout.groups import group_by_step
from syncheck.records import Unreadable
from syncheck.tensors.blocks import Files
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    current = _tensors_by_rank(now)
    stale: dict[int, int] = {}
    with Files(jobs=jobs) as files:
        for step, replicas in reversed(earlier[-MOST_STEPS:]):
            if not odd - stale.keys():
                break
            before = _tensors_by_rank(replicas)
            for rank in sorted(odd - stale.keys()):
                # One rank of the majority represents it. Without a majority, take any other rank.
                others = [r for r in before if r != rank and (r not in odd or len(odd) == len(current))]
                if _equals_earlier(
                    rank, current[rank], {r: before[r] for r in others}, differing, None if quick else files
                ):
                    stale[rank] = step
    # If all ranks match earlier steps, no rank is behind other ranks.
    return stale if len(stale) < len(current) else {}


def _tensors_by_rank(replicas: ReplicaGroup) -> dict[int, dict[str, Tensor]]:
    snapshots = dict(replicas.ranks)
    aligned: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for rank, snapshot in replicas.ranks:
        for name, tensor in normalize_keys(snapshot.tensors).items():
            aligned[name][rank] = tensor
    rename_copies(aligned, snapshots)
    return {rank: {name: tensors[rank] for name, tensors in aligned.items() if rank in tensors} for rank in snapshots}


def _equals_earlier(
    rank: int,
    current: Mapping[str, Tensor],
    before: Mapping[int, Mapping[str, Tensor]],
    differing: Sequence[TensorDiff],
    files: Files | None,
) -> bool:
    """Whether all differing tensors of a rank equal those of a replica in `before`. Usually the first decides."""
    own = [diff for diff in differing if any(rank in ranks for ranks in diff.clusters)]
    for diff in own:
        replicas = next((ranks for ranks in diff.replica_groups if rank in ranks), ())
        other = next((before[r] for r in replicas if r in before and diff.name in before[r]), {})
        if not (
            diff.name in current and diff.name in other and _are_equal(current[diff.name], other[diff.name], files)
        ):
            return False
    return bool(own)


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
