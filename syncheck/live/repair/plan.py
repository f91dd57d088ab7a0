"""What to copy, from which rank to which, by a report alone: every rank comes to the same plan or the same refusal."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck.errors import UsageError
from syncheck.kinds import BUFFERS, OPTIMIZER
from syncheck.live.memory.modules import EXTRA_STATE
from syncheck.live.repair import votes
from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncheck.live.repair.votes import Ranks, Vote
    from syncheck.records import Group, Report, TensorDiff, ValueDiff

MAJORITY = "majority"
_NAMED = 5  # names that an error or a summary tells


@dataclass(frozen=True, slots=True)
class Job:
    """A tensor to copy within one replica group. ranks: the group; targets: those of it that hold something else."""

    name: str
    ranks: Ranks
    source: int
    targets: Ranks


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is no tensor of every rank: a value, or optimizer state that some lack. All of `ranks` take the source's.

    held: whether the report says that the source has it, as a tensor or a value other than None.
    """

    name: str
    ranks: Ranks
    source: int
    held: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done. sources: the healthy rank by replica group. why: how it was chosen, in words."""

    jobs: tuple[Job, ...]
    leaves: tuple[Leaf, ...]
    sources: Mapping[Ranks, int]
    why: str


@dataclass
class _Sources:
    """The source of each replica group: the rank asked for, else the first that is in every majority."""

    asked: int | str
    votes: Sequence[Vote]
    found: dict[Ranks, int] = field(default_factory=dict)

    def of(self, ranks: Ranks, groups: tuple[Ranks, ...] = ()) -> int:
        """Return the source of a replica group. groups: all of that tensor. Raises UsageError where there is none."""
        if ranks not in self.found:
            named = self._named(ranks, groups) if isinstance(self.asked, int) else None
            self.found[ranks] = self._healthy(ranks) if named is None else named
        return self.found[ranks]

    def _named(self, ranks: Ranks, groups: tuple[Ranks, ...]) -> int | None:
        """Return the rank asked for, or the one that stands where it does in a replica group that it is not in."""
        assert isinstance(self.asked, int)
        if self.asked in ranks:
            return self.asked
        home = next((group for group in groups if self.asked in group), ())
        # The groups of a mesh are listed alike, so that one position in each is one whole replica of the model.
        return ranks[home.index(self.asked)] if home and len({len(group) for group in groups}) == 1 else None

    def _healthy(self, ranks: Ranks) -> int:
        counted = [vote for vote in self.votes if vote.counts and set(vote.ranks) & set(ranks)]
        tied = [vote for vote in counted if not vote.majority]
        if tied:
            raise UsageError(_no_majority(tied, self.asked))
        faults = {rank: vote.name for vote in counted for rank in vote.ranks if rank not in vote.majority}
        healthy = [rank for rank in ranks if rank not in faults]
        if not healthy:
            told = ", ".join(f"rank {rank} differs in {faults[rank]}" for rank in ranks[:_NAMED])
            raise UsageError(
                f"no rank of {ranks_text(ranks)} is in the majority everywhere: {told}; source=RANK names one"
            )
        return healthy[0]


def planned(report: Report, source: int | str, groups_of: Callable[[str], tuple[Ranks, ...]] = lambda _: ()) -> Plan:
    """Return what makes all ranks equal to healthy ones. Without side effects, and the same on every rank.

    report: out of sync. source: a rank of the report, or "majority" for the ranks that are in the largest set, of more
    than half of the ranks, of every tensor and value that differs. Within each replica group of a tensor there is one
    source; with a rank named, the other groups take the member at the same place of the mesh, else their majority.
    groups_of: gives the replica groups of optimizer state that some ranks lack, by its name; none where it ought to be
    the same on all.
    Raises UsageError where no source can be found, and for what differs in structure.
    """
    group = report.groups[0]
    left = _allowed(group)
    diffs = [d for d in group.tensors if d.name not in left and d.kind != "rng"]
    values = [v for v in group.values if v.counts and v.name not in left]
    _refuse_unlike(diffs, values)
    ranks = tuple(sorted(group.ranks))
    cast = [*_of_tensors(diffs, ranks, groups_of), *_of_values(values, ranks)]
    sources = _Sources(source, cast)
    jobs: list[Job] = []
    leaves: dict[tuple[str, Ranks], Leaf] = {}
    for vote in sorted(cast, key=lambda vote: not vote.counts):  # first those that say who is healthy
        chosen = sources.of(vote.ranks, vote.groups)
        held = chosen not in vote.absent
        if _is_extra(vote.name):
            extra = _whole(vote.name)
            leaves[extra, ranks] = Leaf(extra, ranks, chosen, held=False)
            continue
        if vote.absent or vote.kind == "value":
            leaves[vote.name, vote.ranks] = Leaf(vote.name, vote.ranks, chosen, held)
        if held and vote.kind != "value":
            same = next(found for found in vote.sets if chosen in found)
            targets = tuple(rank for rank in vote.ranks if rank not in same)
            jobs.append(Job(vote.name, vote.ranks, chosen, targets))
    for value in values:  # None here and missing there look alike in a report
        whole = _whole(value.name)
        leaves.setdefault((whole, ranks), Leaf(whole, ranks, sources.of(ranks), held=False))
    return Plan(tuple(jobs), tuple(leaves.values()), dict(sources.found), _why(source, cast))


def named(names: Iterable[str]) -> str:
    """List a few names: 'a, b and 7 more'."""
    listed = list(dict.fromkeys(names))
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more


def _is_extra(name: str) -> bool:
    """Whether a name is of what a module gives as its extra state: that is set as a whole."""
    return EXTRA_STATE in name.split(".")


def _whole(name: str) -> str:
    """Return the name of the extra state that a name is of; any other name as it is."""
    parts = name.split(".")
    return ".".join(parts[: parts.index(EXTRA_STATE) + 1]) if EXTRA_STATE in parts else name


def _allowed(group: Group) -> set[str]:
    """Name the tensors and values that differ by leave: only findings that do not fail cover them."""
    failing = {name for found in group.findings if found.fails for name in (*found.tensors, *found.values)}
    passing = {name for found in group.findings if not found.fails for name in (*found.tensors, *found.values)}
    return passing - failing


def _refuse_unlike(diffs: Iterable[TensorDiff], values: Iterable[ValueDiff]) -> None:
    unlike = [
        f"{diff.name} ({diff.reason}: {diff.detail})"
        for diff in diffs
        if diff.reason in ("shape", "dtype")
        or (diff.reason == "missing" and diff.kind not in OPTIMIZER and not _is_extra(diff.name))
    ]
    unlike += [f"{v.name} (other parameters)" for v in values if v.name.endswith((".params", ".(positions)"))]
    if unlike:
        raise UsageError(
            f"resync copies values and cannot change a structure; not alike on all ranks: {named(unlike)}. Build the "
            "same model and optimizer on every rank, or load a checkpoint, and call it again"
        )


def _of_tensors(diffs: Iterable[TensorDiff], ranks: Ranks, groups_of: Callable[[str], tuple[Ranks, ...]]) -> list[Vote]:
    """Return the votes of tensors. ranks: all. Raises UsageError for one that only a single rank could hold."""
    cast: list[Vote] = []
    alone = []
    for diff in diffs:
        # A part that ZeRO dealt out to one rank is told with that rank alone; the others know no place for it.
        part = bool(diff.replica_groups) and all(len(of) == 1 for of in diff.replica_groups)
        known = groups_of(diff.name) if diff.reason == "missing" and not part else ()
        found = votes.of_tensor(diff, known or diff.replica_groups or (ranks,))
        cast += found
        alone += [diff.name] if diff.out_of_sync and not found else []
    if alone:
        raise UsageError(f"no other rank holds a copy of {named(alone)}; load it from a checkpoint")
    return cast


def _of_values(values: Iterable[ValueDiff], ranks: Ranks) -> list[Vote]:
    return [vote for value in values if len((vote := votes.of_value(value, ranks)).sets) > 1]


def _no_majority(tied: Sequence[Vote], asked: int | str) -> str:
    """Say what has no majority, and what to do."""
    if isinstance(asked, int):
        return (
            f"rank {asked} is in no replica group of {ranks_text(tied[0].ranks)}, and they have no majority of their "
            f"own for {named(vote.name for vote in tied)}"
        )
    alike: dict[str, list[str]] = {}  # mostly all of them, which is said once
    for vote in tied:
        alike.setdefault(vote.told, []).append(vote.name)
    told = "; ".join(f"{named(names)} ({split})" for split, names in list(alike.items())[:_NAMED])
    text = f"no majority: {told}; source=RANK names the healthy rank"
    if all(vote.kind in BUFFERS for vote in tied):
        text += (
            ". Under plain DDP each rank has its own BatchNorm statistics: source=0 takes those of rank 0, "
            "only=('params', 'optimizer') leaves them"
        )
    return text


def _why(source: int | str, cast: Sequence[Vote]) -> str:
    if isinstance(source, int):
        return "named by the caller"
    counted = [(len(vote.majority), len(vote.ranks)) for vote in cast if vote.counts]
    most, of = min(counted, default=(0, 0))
    return f"majority of {most} of {of}" if of else MAJORITY
