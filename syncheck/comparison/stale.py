"""Detect stale ranks: their tensors equal the other ranks' tensors at an earlier step."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from syncheck.errors import CheckpointError
from syncheck.layout.alignment import align
from syncheck.layout.groups import group_by_step
from syncheck.records import Unreadable
from syncheck.tensors.blocks import Files
from syncheck.tensors.clustering import cluster_replicas
from syncheck.text import find_set

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.records import Comparison, TensorDiff
    from syncheck.snapshots import Tensor

# Kinds that a step updates equally on all ranks. Running statistics differ between ranks without a fault.
_KINDS = ("parameter", "optimizer", "optimizer_step")
# Maximum number of earlier steps, from the latest.
MOST_STEPS = 50


def add_stale_ranks(
    compared: Sequence[tuple[Comparison, CheckpointGroup]],
    unreadable: list[Unreadable],
    jobs: int | None,
    *,
    quick: bool,
) -> list[Comparison]:
    """Add the stale ranks of each group to its evidence.

    compared: groups with their files. quick: compare stored checksums only. Files that cannot be read any more are
    added to `unreadable`.
    """
    runs = group_by_step(replicas for _, replicas in compared)
    groups = []
    for group, now in compared:
        search = _Search(group, now, _list_earlier(now, runs))
        stale: dict[int, int] = {}
        try:
            stale = search.find(jobs, quick=quick)
        except CheckpointError as error:  # from this step or from an earlier step
            unreadable.append(Unreadable(error.path, error.reason))

        if stale:
            evidence = replace(group.evidence, stale=stale)
            group = replace(group, evidence=evidence)

        groups.append(group)

    return groups


def _list_earlier(
    now: CheckpointGroup, runs: Mapping[str, Mapping[int, CheckpointGroup]]
) -> list[tuple[int, CheckpointGroup]]:
    """Return the earlier steps of the run of a group, from the latest. runs: groups by run and step, in order."""
    if now.step is None:
        return []

    steps = runs[now.run].items()
    earlier = [(step, replicas) for step, replicas in steps if step < now.step]
    return earlier[-MOST_STEPS:][::-1]


class _Search:
    """The search for the stale ranks of one group.

    A rank is stale if all of its tensors that differ are bitwise equal to another rank's tensors at an earlier step.
    """

    def __init__(self, group: Comparison, now: CheckpointGroup, earlier: Sequence[tuple[int, CheckpointGroup]]) -> None:
        self._now = now
        self._earlier = earlier
        self._differing: list[TensorDiff] = []
        self._suspects: set[int] = set()
        for diff in group.tensors:
            is_updated = diff.kind in _KINDS
            if is_updated and diff.status == "different":
                self._differing.append(diff)
                self._suspects.update(diff.minority)

        # Without a majority, any rank may be stale.
        self._suspects = self._suspects or set(group.ranks)

    def find(self, jobs: int | None, *, quick: bool) -> dict[int, int]:
        """Return stale ranks with the latest step whose parameters and optimizer state they hold.

        Raises CheckpointError if a file can no longer be read.
        """
        if not self._earlier:
            return {}

        if not any(diff.kind == "parameter" for diff in self._differing):
            return {}

        current = align(dict(self._now.ranks)).tensors
        stale: dict[int, int] = {}
        with Files(jobs=jobs) as files:
            for step, replicas in self._earlier:
                remaining_ranks = sorted(self._suspects - stale.keys())
                if not remaining_ranks:
                    break

                snapshots = dict(replicas.ranks)
                before = align(snapshots).tensors
                for rank in remaining_ranks:
                    sources = self._choose_sources(rank, set(snapshots))
                    is_stale = self._equals(
                        rank,
                        current,
                        before,
                        sources,
                        None if quick else files,
                    )
                    if is_stale:
                        stale[rank] = step

        # If all ranks match earlier steps, no rank is behind other ranks.
        return stale if len(stale) < len(self._now.ranks) else {}

    def _choose_sources(self, rank: int, ranks_before: set[int]) -> set[int]:
        """Return the ranks of an earlier step to compare with: the majority, or without one, all other ranks."""
        if len(self._suspects) < len(self._now.ranks):
            return ranks_before - self._suspects

        return ranks_before - {rank}

    def _equals(
        self,
        rank: int,
        current: Mapping[str, Mapping[int, Tensor]],
        before: Mapping[str, Mapping[int, Tensor]],
        sources: Collection[int],
        files: Files | None,
    ) -> bool:
        """Whether all differing tensors of a rank equal those at an earlier step. Usually the first decides.

        current, before: the tensors of both steps by name and rank.
        sources: the ranks whose tensors count at the earlier step.
        files: None to compare stored checksums and digests only.
        """
        diffs_of_rank = [diff for diff in self._differing if rank in chain.from_iterable(diff.clusters)]
        for diff in diffs_of_rank:
            tensor = current.get(diff.name, {}).get(rank)
            tensors_before = before.get(diff.name, {})
            earlier = _find_replica(
                diff,
                rank,
                tensors_before,
                sources,
            )
            if tensor is None or earlier is None:
                return False

            if not _are_equal(tensor, earlier, files):
                return False

        return len(diffs_of_rank) > 0


def _find_replica(
    diff: TensorDiff, rank: int, tensors: Mapping[int, Tensor], sources: Collection[int]
) -> Tensor | None:
    """Return the tensor of the first rank in the replica group of a rank; None if no rank there holds it."""
    replica_group = find_set(rank, diff.replica_groups)
    present_ranks = [source for source in replica_group if source in sources and source in tensors]
    if not present_ranks:
        return None

    return tensors[present_ranks[0]]


def _are_equal(mine: Tensor, theirs: Tensor, files: Files | None) -> bool:
    """Whether two tensors are bitwise equal. files: None to compare stored checksums and digests only."""
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        return False

    if mine.refused or theirs.refused:
        return False

    identities = {_identify(mine), _identify(theirs)}
    # A fingerprint and a file of the same run have nothing to compare.
    if identities != {None}:
        return len(identities) == 1

    if files is not None:
        return len(cluster_replicas((mine, theirs), files)) == 1

    from syncheck.tensors.digests import compare_checksums

    return compare_checksums((mine, theirs)).clusters == ((0, 1),)


def _identify(tensor: Tensor) -> tuple[str, str] | None:
    """Return the algorithm and the value of the digest of a tensor; None for a tensor with bytes."""
    if tensor.digest is None:
        return None

    return tensor.digest.algorithm, tensor.digest.value
