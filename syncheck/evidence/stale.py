"""Is a rank where the others were at an earlier step? Its bytes against theirs of then."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import CheckpointError
from syncheck.kernel.blocks import Files
from syncheck.kernel.clustering import cluster_replicas
from syncheck.layout.groups import by_step
from syncheck.names import by_normal_name
from syncheck.records import Unreadable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Tensor

# What a step moves on all ranks alike. Running statistics differ between ranks by themselves.
_KINDS = ("parameter", "optimizer", "optimizer_step")
# Earlier steps that are looked at, the latest first.
MOST_STEPS = 50


def add_stale_ranks(
    compared: Sequence[tuple[Comparison, ReplicaGroup]], unreadable: list[Unreadable], jobs: int | None, *, quick: bool
) -> list[Comparison]:
    """Add to each group which of its ranks are where the others were at an earlier step of the same run.

    compared: groups with their files. quick: by stored checksums only. A file that breaks while it is read is added to
    `unreadable`.
    """
    runs = by_step(replicas for _, replicas in compared)
    found = []
    for group, now in compared:
        step = now.step
        earlier = [] if step is None else [(s, r) for s, r in runs[now.run].items() if s < step]
        try:
            stale = _stale_ranks(group, now, earlier, jobs, quick=quick)
        except CheckpointError as error:  # of this step or of an earlier one
            unreadable.append(Unreadable(error.path, error.reason))
            stale = {}
        found.append(replace(group, evidence=replace(group.evidence, stale=stale)) if stale else group)
    return found


def _stale_ranks(
    group: Comparison, now: ReplicaGroup, earlier: Sequence[tuple[int, ReplicaGroup]], jobs: int | None, *, quick: bool
) -> dict[int, int]:
    """Return the ranks whose differing parameters and optimizer state are, to the byte, another rank's of before.

    now: the group's files; earlier: those of the same run's earlier steps, in order. Returns that step by rank, the
    latest of them. Raises CheckpointError when a file can no longer be read.
    """
    apart = [diff for diff in group.tensors if diff.kind in _KINDS and diff.status == "different"]
    if not earlier or not any(diff.kind == "parameter" for diff in apart):
        return {}
    odd = {rank for diff in apart for rank in diff.minority} or set(group.ranks)
    today = _named(now)
    found: dict[int, int] = {}
    with Files(jobs=jobs) as files:
        for step, replicas in reversed(earlier[-MOST_STEPS:]):
            if not odd - found.keys():
                break
            before = _named(replicas)
            for rank in sorted(odd - found.keys()):
                # One rank of those that are not odd now stands for all of them, and where all are odd any other one.
                other = next((r for r in before if r != rank and (r not in odd or len(odd) == len(today))), None)
                if other is not None and _is_at(rank, today[rank], before[other], apart, None if quick else files):
                    found[rank] = step
    # Where every rank is at an earlier step, there are no others that they are behind of.
    return found if len(found) < len(today) else {}


def _named(replicas: ReplicaGroup) -> dict[int, dict[str, Tensor]]:
    return {rank: by_normal_name(snapshot.tensors) for rank, snapshot in replicas.ranks}


def _is_at(
    rank: int,
    today: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    apart: Sequence[TensorDiff],
    files: Files | None,
) -> bool:
    """Whether all of a rank's tensors that differ from the others' are those of `before`: usually the first tells."""
    mine = [diff.name for diff in apart if any(rank in ranks for ranks in diff.clusters)]
    return bool(mine) and all(
        name in today and name in before and _alike(today[name], before[name], files) for name in mine
    )


def _alike(mine: Tensor, theirs: Tensor, files: Files | None) -> bool:
    """Whether two tensors are equal to the byte. files: None to go by stored checksums and digests only."""
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape) or mine.refused or theirs.refused:
        return False
    if mine.digest is not None and theirs.digest is not None:
        return (mine.digest.algorithm, mine.digest.value) == (theirs.digest.algorithm, theirs.digest.value)
    if files is None:
        from syncheck.kernel.checksums import compare_checksums  # what nobody asked for is not imported

        return mine.digest is theirs.digest and compare_checksums((mine, theirs)).clusters == ((0, 1),)
    return mine.digest is theirs.digest and len(cluster_replicas((mine, theirs), files)) == 1
