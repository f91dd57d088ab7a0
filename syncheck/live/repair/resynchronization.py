"""Repair a job whose ranks are out of sync: copy the differences from a healthy rank, and check again.

resync(model, optimizer, scaler)                # from a rank in the majority
resync(model, optimizer, scaler, source=0)      # from rank 0
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import RankFailed, SyncheckError, UsageError
from syncheck.live.channel import Channel
from syncheck.live.checks import check, exclude_from_compile, group_of
from syncheck.live.repair.plan import MAJORITY, SHOWN, plan_repair
from syncheck.live.repair.state import ReplicaState, broadcast_tensors, get_size
from syncheck.report import words
from syncheck.text import brief, names_text, one_line, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.repair.plan import Job
    from syncheck.records import Report

__all__ = ["Resync", "resync"]


class Copied(NamedTuple):
    """A tensor whose bytes were sent. bytes: of the tensor, or of the replica group's shard."""

    name: str
    source: int
    ranks: tuple[int, ...]
    bytes: int


class Changed(NamedTuple):
    """A value set on some ranks, or optimizer state created or removed there."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Resync:
    """The changes that `resync` made; the same on all ranks.

    before: the report with the differences. after: the report in sync; the same object if there were no differences.
    sources: the healthy rank by replica group. why: how the source was chosen. copied: tensors whose bytes were sent,
    including created tensors. values: plain values set or removed, and parts of a module's extra state. created:
    optimizer state missing on a rank. removed: optimizer state missing on the source.
    """

    before: Report
    after: Report
    sources: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    why: str = ""
    copied: tuple[Copied, ...] = ()
    values: tuple[Changed, ...] = ()
    created: tuple[Changed, ...] = ()
    removed: tuple[Changed, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all copied tensors."""
        return sum(copied.bytes for copied in self.copied)

    @property
    def summary(self) -> str:
        """The changes in a few lines of plain text."""
        if self.before is self.after:
            return "resync: nothing to do, the ranks are in sync"
        changes: dict[str, Sequence[Copied | Changed]] = {
            "copied": self.copied, "set": self.values, "created": self.created, "removed": self.removed,
        }  # fmt: skip
        targets = sorted({rank for done in changes.values() for change in done for rank in change.ranks})
        size = f"{self.bytes} bytes" if self.bytes < 1000 else words.bytes_text(self.bytes)
        amount = f"{len(self.copied):,} tensor{'s' * (len(self.copied) != 1)}, {size}"
        if self.values:
            amount += f", {len(self.values):,} value{'s' * (len(self.values) != 1)}"
        origin = f"{ranks_text(sorted(set(self.sources.values())))} ({self.why})"
        lines = [f"resync from {origin}: {amount}, on {ranks_text(targets)}; proved in sync"]
        for verb, done in changes.items():
            # The first line already has the ranks if all changes have the same ranks.
            names = [c.name if list(c.ranks) == targets else f"{c.name} ({ranks_text(c.ranks)})" for c in done]
            lines += [f"  {verb}: {names_text(names, SHOWN)}"] if done else []
        return "\n".join(map(one_line, lines))


@exclude_from_compile
def resync(
    model: Any,
    optimizer: Any = None,
    scaler: Any = None,
    *,
    source: int | str = MAJORITY,
    group: Any = None,
    mesh: Any = None,
    only: Sequence[str] = (),
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    **checking: Any,
) -> Resync:
    """Copy the model of a healthy rank to all other ranks in place, check again, and return the changes.

    A collective call: every rank of the group must make it, between `optimizer.step()` and the next forward. Differing
    parameters, buffers and optimizer state are overwritten bit by bit. Learning rates, the scaler's state and other
    values are set. Missing optimizer state is created, surplus state is removed. RNG states and gradients do not
    change. Parameters remain the same objects.

    source: "majority" (a rank that is in the set of more than half of the ranks for every differing tensor), or a
    global rank. group, mesh, only, include, exclude: as in `check`, which runs before and after the repair. checking:
    other arguments of `check`, for example allow; rng has no effect.

    Raises the same error on all ranks: UsageError, before any change, without a majority, for ranks of different
    structure, and for a source outside the group; RankFailed if a rank fails during the repair, or if the ranks still
    differ afterwards. Then it is safe to call it again with the same source.
    """
    group = group_of(mesh) if group is None else group
    channel = Channel(group)
    parts = tuple(part for part in (model, optimizer, scaler) if part is not None)
    channel.run_together(lambda: _check_arguments(channel, source, only, checking))

    def run() -> Report:
        names: dict[str, Any] = {"only": only, "include": include, "exclude": exclude}
        return check(model, optimizer, scaler, group=group, mesh=mesh, **names, **{**checking, "rng": False})

    before = run()
    if before.verdict == "in_sync":
        return Resync(before, before)
    jobs, copied = channel.run_together(lambda: _repair(channel, group, parts, before, source))
    after = run()
    if after.verdict != "in_sync":
        raise RankFailed(_format_remaining(after))
    result = Resync(
        before,
        after,
        {job.ranks: job.source for job in jobs},
        _format_choice(source, jobs),
        copied,
        values=tuple(Changed(job.name, job.targets) for job in jobs if job.kind == "value" and job.targets),
        created=tuple(Changed(job.name, job.absent) for job in jobs if job.sends_bytes and job.absent),
        removed=tuple(Changed(job.name, job.targets) for job in jobs if job.kind != "value" and not job.sends_bytes),
    )
    if channel.is_leader:
        with suppress(Exception):  # a failing handler would raise on this rank only
            logging.getLogger("syncheck").warning("%s", result.summary)
    return result


def _check_arguments(channel: Channel, source: int | str, only: Sequence[str], checking: Mapping[str, Any]) -> None:
    """Raise UsageError on all ranks for invalid arguments and for a source that differs between ranks."""
    unknown = checking.keys() - inspect.signature(check).parameters.keys()
    if unknown:
        raise UsageError(f"{min(unknown)}=: no such option of resync or of syncheck.live.check")
    sources = channel.gather(source, "source")
    if len(set(map(repr, sources.values()))) > 1:
        texts = [f"{brief(value, 20)} on rank {rank}" for rank, value in sources.items()]
        raise UsageError(f"source= differs between ranks: {names_text(texts, SHOWN)}")
    is_rank = isinstance(source, int) and not isinstance(source, bool)
    if source != MAJORITY and not is_rank:
        raise UsageError(f'source={brief(source)}: must be "majority" or a rank number')
    if is_rank and source not in channel.ranks:
        raise UsageError(f"source={source} is not in the group; choose from {ranks_text(sorted(channel.ranks))}")
    if "rng" in only:
        raise UsageError("only='rng': RNG states differ by design, so resync does not change them")


def _repair(
    channel: Channel, group: Any, parts: tuple[Any, ...], before: Report, source: int | str
) -> tuple[tuple[Job, ...], tuple[Copied, ...]]:
    """Repair this rank together with all other ranks. Looks up every tensor and object before the first change."""
    if before.verdict != "out_of_sync":
        raise UsageError("no tensor could be compared, so there is no healthy rank to copy from")
    rank, state, jobs = channel.rank, ReplicaState(parts), plan_repair(before, source)
    for job in jobs:
        if job.sets_entry and rank in job.ranks:
            state.find_holder(job.name)
        elif rank in (job.source, *job.targets):
            state.find_tensor(job.name, writable=rank != job.source)
    own_jobs = [job for job in jobs if job.source == rank]
    own = (
        {job.name: get_size(state.find_tensor(job.name), group) for job in own_jobs if job.sends_bytes},
        {job.name: state.find_entry(job.name) for job in own_jobs if job.sets_entry},
    )
    # A rank that fails up to here leaves all ranks unchanged.
    by_rank = channel.gather(own, "sizes")
    copies = [(job, by_rank[job.source][0][job.name]) for job in jobs if job.sends_bytes]
    receivers: dict[tuple[int, str], set[int]] = defaultdict(set)
    for job in jobs:
        if job.sets_entry:  # no targets: None on some ranks, missing on other ranks
            receivers[job.source, by_rank[job.source][1][job.name]].update(job.targets or job.ranks)
    try:
        for (of, entry), ranks in receivers.items():
            sent = channel.share(partial(state.dump_entry, entry), [of], "entries")
            if rank in ranks and rank != of:
                state.load_entry(entry, sent[of])
        tensors = [
            (state.find_tensor(job.name) if rank in (job.source, *job.targets) else None, job.source, size)
            for job, size in copies
            if not job.sets_entry
        ]
        broadcast_tensors(channel, tensors)
    except Exception as error:
        if channel.ended and not channel.broken:  # all ranks raise the same error already
            raise
        kind = "" if isinstance(error, SyncheckError) else f"{type(error).__name__}: "
        sources = {job.source for job in jobs}
        again = f"source={min(sources)}" if len(sources) == 1 else "the same source"
        raise RankFailed(
            f"resync failed during the repair: {kind}{error}"[:300]
            + f". Some tensors may be copied already; calling it again with {again} is safe"
        ) from error
    return jobs, tuple(Copied(job.name, job.source, job.targets, size[0]) for job, size in copies)


def _format_choice(source: int | str, jobs: Sequence[Job]) -> str:
    if isinstance(source, int):
        return "chosen by the caller"
    agreeing, of = min(((len(job.majority), len(job.ranks)) for job in jobs), default=(0, 0))
    return f"majority of {agreeing} of {of}"


def _format_remaining(after: Report) -> str:
    group = after.groups[0]
    names = [diff.name for diff in group.tensors if diff.out_of_sync] + [v.name for v in group.values if v.counts]
    return (
        f"still out of sync after resync: {names_text(names, SHOWN)}; possible causes: state_dict() returns copies "
        "that load_state_dict() ignores, tensors are tied on some ranks only, or new differences have appeared"
    )
