"""Plan a repair from a report alone, so that all ranks have the same plan or raise the same error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.frozen import record
from syncheck.live.memory.objects import EXTRA_STATE
from syncheck.records import largest_first
from syncheck.tensors.kinds import BUFFERS, OPTIMIZER
from syncheck.text import group_ranks, names_text, option_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff, ValueDiff

    Ranks = tuple[int, ...]

MAJORITY = "majority"
SHOWN = 5  # names in an error or a summary
# Ends of names of the values that list the parameters of an optimizer.
_MEMBERSHIP = (".params", ".(positions)")


class NoMajority(UsageError):
    """No majority determines the source of a repair; the caller must choose a rank."""


@record
class Job:
    """A difference in one tensor or value within one replica group, and the rank to copy from.

    kind: of the tensor; "value" for a plain value or a part of a module's extra state.
    ranks: the replica group, sorted.
    sets: ranks with equal bytes or values, largest first.
    absent: ranks without the tensor or value.
    groups: all replica groups of the tensor.
    source: -1 until chosen.
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
        largest = self.sets[0]
        return largest if 2 * len(largest) > len(self.ranks) else ()

    @property
    def targets(self) -> Ranks:
        """The ranks that differ from the source."""
        (healthy,) = [ranks for ranks in self.sets if self.source in ranks]
        return tuple(sorted(set(self.ranks).difference(healthy)))

    @property
    def lacks_tensor(self) -> bool:
        """Whether a tensor, and not a value, is missing on some ranks."""
        return self.kind != "value" and bool(self.absent)

    @property
    def sends_bytes(self) -> bool:
        """Whether the bytes of a tensor are sent. False for values, and if the source lacks the tensor."""
        return self.kind != "value" and self.source not in self.absent

    @property
    def sets_entry(self) -> bool:
        """Whether an object gets a new entry instead of overwriting a tensor."""
        return self.kind == "value" or bool(self.absent)


def plan_repair(report: Report, source: int | str) -> tuple[Job, ...]:
    """Return the jobs of a repair. Each replica group has one source.

    report: out of sync.
    source: a rank of the report, or "majority": the first rank in the set of more than half of the ranks for every
        differing tensor and value. A chosen rank represents its replica: other replica groups use the rank at the same
        position, or their own majority.

    Raises UsageError without a source, and if the ranks differ in structure.
    """
    group = report.groups[0]
    diffs = _list_failing_tensors(group)
    values = _list_failing_values(group)
    _refuse_structure(diffs, values)

    ranks = tuple(sorted(group.ranks))
    unsourced: list[Job] = []
    names_without_copies: set[str] = set()
    for diff in diffs:
        jobs_of_tensor = _make_tensor_jobs(diff, ranks)
        unsourced += jobs_of_tensor
        if not jobs_of_tensor:
            names_without_copies.add(diff.name)

    for value in values:
        unsourced.append(_make_value_job(value, ranks))

    jobs = _set_sources(unsourced, source)
    # A report with shards has no replica groups for a missing tensor.
    if group.shards:
        names_without_copies.update(job.name for job in jobs if job.lacks_tensor)

    if names_without_copies:
        names = _join_names(sorted(names_without_copies))
        raise UsageError(f"no other rank has a copy of {names}; load it from a checkpoint")

    return jobs


def _list_failing_tensors(group: Group) -> list[TensorDiff]:
    """Return the tensors out of sync that the options do not tolerate."""
    tolerated = _list_tolerated(group.findings)
    return [diff for diff in group.tensors if diff.out_of_sync and diff.name not in tolerated]


def _list_failing_values(group: Group) -> list[ValueDiff]:
    """Return the values out of sync that the options do not tolerate."""
    tolerated = _list_tolerated(group.findings)
    return [value for value in group.values if value.counts and value.name not in tolerated]


def _list_tolerated(findings: Iterable[Finding]) -> set[str]:
    """Return the names of tensors and values that are only in findings that the options tolerate."""
    passing: set[str] = set()
    failing: set[str] = set()
    for finding in findings:
        names = failing if finding.fails else passing
        names.update(finding.tensors, finding.values)

    return passing - failing


def _set_sources(jobs: Sequence[Job], source: int | str) -> tuple[Job, ...]:
    """Return the jobs with the rank to copy from. source: as in `plan_repair`."""
    # One source for each replica group: tensors of two ranks would be a model that never existed.
    source_of: dict[Ranks, int] = {}
    for job in jobs:
        if job.ranks not in source_of:
            source_of[job.ranks] = _choose_source(job, source, jobs)

    return tuple(replace(job, source=source_of[job.ranks]) for job in jobs)


def _refuse_structure(diffs: Iterable[TensorDiff], values: Iterable[ValueDiff]) -> None:
    """Raise UsageError for differences in structure: shapes, dtypes, names, parameter groups."""
    different = []
    for diff in diffs:
        if _differs_in_structure(diff):
            different.append(f"{diff.name} ({diff.reason}: {diff.detail})")

    for value in values:
        if value.name.endswith(_MEMBERSHIP):
            different.append(f"{value.name} (different parameters)")

    if different:
        raise UsageError(
            "resync copies values and cannot change the structure, which differs between ranks: "
            f"{_join_names(different)}. Build the same model and optimizer on every rank, or load a checkpoint, and "
            "call resync again"
        )


def _differs_in_structure(diff: TensorDiff) -> bool:
    """Whether the shapes or dtypes of a tensor differ, or a missing tensor cannot be created."""
    if diff.reason != "missing":
        return diff.reason in ("shape", "dtype")

    # Entries of dictionaries can be created, parameters and buffers cannot.
    may_create = diff.kind in OPTIMIZER or _is_extra(diff.name)
    return not may_create


def _is_extra(name: str) -> bool:
    return EXTRA_STATE in name.split(".")


def _make_tensor_jobs(diff: TensorDiff, ranks: Ranks) -> list[Job]:
    """Return one job per replica group with a difference. ranks: all."""
    groups = tuple(tuple(sorted(members)) for members in diff.replica_groups) or (ranks,)
    kind = "value" if _is_extra(diff.name) else diff.kind
    absent: set[int] = set()
    if diff.reason == "missing":
        absent = set(ranks).difference(*diff.clusters)

    jobs = []
    for members in groups:
        absent_members = tuple(sorted(absent.intersection(members)))
        # Clusters of other replica groups hold other parts of the tensor.
        sets = [equal for equal in diff.clusters if equal and set(equal) <= set(members)]
        if absent_members:
            sets.append(absent_members)

        if len(sets) > 1:
            jobs.append(
                Job(
                    name=diff.name,
                    kind=kind,
                    ranks=members,
                    sets=largest_first(sets),
                    absent=absent_members,
                    groups=groups,
                )
            )

    return jobs


def _make_value_job(value: ValueDiff, ranks: Ranks) -> Job:
    """Return the job of a value. A report does not distinguish None from a missing value."""
    texts: dict[int, str] = {}
    absent: list[int] = []
    for rank in ranks:
        value_of_rank = value.by_rank.get(rank)
        # repr, so that NaN equals NaN
        texts[rank] = repr(value_of_rank)
        if value_of_rank is None:
            absent.append(rank)

    sets = [tuple(equal) for equal in group_ranks(texts).values()]
    return Job(
        name=value.name,
        kind="value",
        ranks=ranks,
        sets=largest_first(sets),
        absent=tuple(absent),
        groups=(ranks,),
    )


def _choose_source(job: Job, source: int | str, jobs: Sequence[Job]) -> int:
    """Return the rank to copy from in the replica group of a job. Raises NoMajority if there is none.

    source: as in `plan_repair`.
    """
    if source in job.ranks:
        return int(source)

    # Replica groups of a mesh have the same order, so the ranks at one position form one complete replica.
    have_equal_sizes = len({len(members) for members in job.groups}) == 1
    for members in job.groups:
        if have_equal_sizes and source in members:
            return job.ranks[members.index(int(source))]

    votes = [vote for vote in jobs if not set(vote.ranks).isdisjoint(job.ranks)]
    return _choose_from_majorities(job.ranks, votes)


def _choose_from_majorities(ranks: Ranks, votes: Sequence[Job]) -> int:
    """Return the first rank that is in the majority of every vote. Raises NoMajority if there is none.

    ranks: to choose from.
    votes: the differences of these ranks.
    """
    # A single tensor without a majority is sufficient to doubt the rank that looks healthy.
    tied = [job for job in votes if not job.majority]
    if tied:
        raise NoMajority(_describe_ties(tied))

    faulty_tensors: dict[int, str] = {}
    for job in votes:
        minority = set(job.ranks).difference(job.majority)
        faulty_tensors.update(dict.fromkeys(minority, job.name))

    for rank in ranks:
        if rank not in faulty_tensors:
            return rank

    texts = [f"rank {rank} differs in {faulty_tensors[rank]}" for rank in ranks]
    raise NoMajority(
        f"no rank of {ranks_text(ranks)} is in the majority for all tensors: {_join_names(texts)}; choose one with "
        "source=RANK"
    )


def _describe_ties(jobs: Sequence[Job]) -> str:
    """Return the text of the error for jobs without a majority."""
    names = _join_names(job.name for job in jobs)
    text = f"no majority: {names}; choose the healthy rank with source=RANK"
    if {job.kind for job in jobs} <= BUFFERS:
        without_buffers = option_text("only", ("params", "optimizer"))
        text += (
            ". Under plain DDP each rank has its own BatchNorm statistics: source=0 copies the statistics of rank "
            f"0, {without_buffers} skips them"
        )

    return text


def _join_names(names: Iterable[str]) -> str:
    return names_text(list(dict.fromkeys(names)), SHOWN)
