"""Plan a repair from a report alone, so that all ranks have the same plan or raise the same error."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.live.memory.objects import EXTRA_STATE
from syncheck.tensors.kinds import BUFFERS, OPTIMIZER
from syncheck.text import group_ranks, names_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Report, TensorDiff, ValueDiff

    Ranks = tuple[int, ...]

MAJORITY = "majority"
SHOWN = 5  # names in an error or a summary


class NoMajority(UsageError):
    """No majority determines the source of a repair; the caller must choose a rank."""


@dataclass(frozen=True, slots=True)
class Job:
    """A difference in one tensor or value within one replica group, and the rank to copy from.

    kind: of the tensor; "value" for a plain value or a part of a module's extra state. ranks: the replica group,
    sorted. sets: ranks with equal bytes or values, largest first. absent: ranks without the tensor or value. groups:
    all replica groups of the tensor. source: -1 until chosen.
    """

    name: str
    kind: str
    ranks: Ranks
    sets: tuple[Ranks, ...]
    absent: Ranks
    groups: tuple[Ranks, ...]
    source: int = -1

    @property
    def majority(self) -> Ranks:
        """The set of more than half of the ranks; empty without a majority."""
        return self.sets[0] if 2 * len(self.sets[0]) > len(self.ranks) else ()

    @property
    def targets(self) -> Ranks:
        """The ranks that differ from the source."""
        same = next(ranks for ranks in self.sets if self.source in ranks)
        return tuple(rank for rank in self.ranks if rank not in same)

    @property
    def sends_bytes(self) -> bool:
        """Whether the bytes of a tensor are sent. False for values, and if the source lacks the tensor."""
        return self.kind != "value" and self.source not in self.absent

    @property
    def sets_entry(self) -> bool:
        """Whether an object gets a new entry instead of overwriting a tensor."""
        return self.kind == "value" or bool(self.absent)


def plan_repair(report: Report, source: int | str) -> tuple[Job, ...]:
    """Return the jobs of a repair.

    report: out of sync. source: a rank of the report, or "majority": the first rank in the set of more than half of the
    ranks for every differing tensor and value. Each replica group has one source. A chosen rank represents its replica:
    other replica groups use the rank at the same position, or their own majority. Raises UsageError without a source,
    and if the ranks differ in structure.
    """
    group = report.groups[0]
    failing = {name for finding in group.findings if finding.fails for name in (*finding.tensors, *finding.values)}
    passing = {name for finding in group.findings if not finding.fails for name in (*finding.tensors, *finding.values)}
    allowed = passing - failing
    diffs = [d for d in group.tensors if d.out_of_sync and d.name not in allowed]
    values = [v for v in group.values if v.counts and v.name not in allowed]
    _refuse_structure(diffs, values)
    ranks = tuple(sorted(group.ranks))
    jobs = [job for diff in diffs for job in _make_tensor_jobs(diff, ranks)]
    alone = {diff.name for diff in diffs} - {job.name for job in jobs}
    jobs += [_make_value_job(value, ranks) for value in values]
    sources: dict[Ranks, int] = {}
    for job in jobs:
        if job.ranks not in sources:
            sources[job.ranks] = _choose_source(job, source, jobs)
    jobs = [replace(job, source=sources[job.ranks]) for job in jobs]
    if group.shards:  # a report has no replica groups for a missing tensor
        alone |= {job.name for job in jobs if job.absent and job.kind != "value"}
    if alone:
        raise UsageError(f"no other rank has a copy of {_join_names(sorted(alone))}; load it from a checkpoint")
    return tuple(jobs)


def _refuse_structure(diffs: Iterable[TensorDiff], values: Iterable[ValueDiff]) -> None:
    """Raise UsageError for differences in structure: shapes, dtypes, names, parameter groups."""
    different = [
        f"{diff.name} ({diff.reason}: {diff.detail})"
        for diff in diffs
        if diff.reason in ("shape", "dtype")
        or (diff.reason == "missing" and diff.kind not in OPTIMIZER and not _is_extra(diff.name))
    ]
    different += [f"{v.name} (different parameters)" for v in values if v.name.endswith((".params", ".(positions)"))]
    if different:
        raise UsageError(
            "resync copies values and cannot change the structure, which differs between ranks: "
            f"{_join_names(different)}. Build the same model and optimizer on every rank, or load a checkpoint, and "
            "call resync again"
        )


def _is_extra(name: str) -> bool:
    return EXTRA_STATE in name.split(".")


def _make_tensor_jobs(diff: TensorDiff, ranks: Ranks) -> list[Job]:
    """Return one job per replica group with a difference. ranks: all."""
    groups = tuple(tuple(sorted(members)) for members in diff.replica_groups) or (ranks,)
    kind = "value" if _is_extra(diff.name) else diff.kind
    present = {rank for cluster in diff.clusters for rank in cluster}
    jobs = []
    for members in groups:
        absent = tuple(rank for rank in members if diff.reason == "missing" and rank not in present)
        sets = [equal for equal in (*diff.clusters, absent) if equal and set(equal) <= set(members)]
        if len(sets) > 1:
            jobs.append(Job(diff.name, kind, members, _largest_first(sets), absent, groups))
    return jobs


def _make_value_job(value: ValueDiff, ranks: Ranks) -> Job:
    """Return the job of a value. A report does not distinguish None from a missing value."""
    by_rank = {rank: value.by_rank.get(rank) for rank in ranks}
    # repr, so that NaN equals NaN
    sets = group_ranks({rank: repr(held) for rank, held in by_rank.items()}).values()
    absent = tuple(rank for rank, held in by_rank.items() if held is None)
    return Job(value.name, "value", ranks, _largest_first(map(tuple, sets)), absent, (ranks,))


def _largest_first(sets: Iterable[Ranks]) -> tuple[Ranks, ...]:
    return tuple(sorted(sets, key=lambda ranks: (-len(ranks), ranks[0])))


def _choose_source(job: Job, asked: int | str, jobs: Sequence[Job]) -> int:
    """Return the rank to copy from in the replica group of a job. Raises UsageError if there is none."""
    if asked in job.ranks:
        return int(asked)
    home = next((members for members in job.groups if asked in members), ())
    if home and len(set(map(len, job.groups))) == 1:
        # Replica groups of a mesh have the same order, so the ranks at one position form one complete replica.
        return job.ranks[home.index(int(asked))]
    voting = [other for other in jobs if set(other.ranks) & set(job.ranks)]
    tied = [other for other in voting if not other.majority]
    if tied:
        text = f"no majority: {_join_names(other.name for other in tied)}; choose the healthy rank with source=RANK"
        if all(other.kind in BUFFERS for other in tied):
            text += (
                ". Under plain DDP each rank has its own BatchNorm statistics: source=0 copies the statistics of rank "
                "0, only=('params', 'optimizer') skips them"
            )
        raise NoMajority(text)
    faults = {rank: other.name for other in voting for rank in other.ranks if rank not in other.majority}
    healthy = [rank for rank in job.ranks if rank not in faults]
    if not healthy:
        texts = _join_names(f"rank {rank} differs in {faults[rank]}" for rank in job.ranks)
        raise NoMajority(
            f"no rank of {ranks_text(job.ranks)} is in the majority for all tensors: {texts}; choose one with "
            "source=RANK"
        )
    return healthy[0]


def _join_names(names: Iterable[str]) -> str:
    return names_text(list(dict.fromkeys(names)), SHOWN)
