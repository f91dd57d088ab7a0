"""Repair a job whose ranks are out of sync: copy the differences from a healthy rank, and check again.

resync(model, optimizer, scaler)                # from a rank in the majority
resync(model, optimizer, scaler, source=0)      # from rank 0
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from contextlib import suppress
from dataclasses import field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import RankFailed, UsageError
from syncheck.frozen import record
from syncheck.live.channel import Channel, describe_error
from syncheck.live.checks import check, exclude_from_compile, group_of
from syncheck.live.repair.plan import MAJORITY, SHOWN, plan_repair
from syncheck.live.repair.state import ReplicaState, broadcast_tensors, get_size
from syncheck.report import words
from syncheck.text import brief, names_text, one_line, ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.repair.plan import Job
    from syncheck.live.repair.state import Size
    from syncheck.records import Report

__all__ = ["Resync", "resync"]


class Copied(NamedTuple):
    """A tensor whose bytes were sent.

    source: the rank that sent them.
    ranks: the ranks that were overwritten.
    bytes: of the tensor, or of the replica group's shard.
    """

    name: str
    source: int
    ranks: tuple[int, ...]
    bytes: int


class Changed(NamedTuple):
    """A value set on some ranks, or optimizer state created or removed there."""

    name: str
    ranks: tuple[int, ...]


@record
class Resync:
    """The changes that `resync` made; the same on all ranks.

    before: the report with the differences.
    after: the report in sync; the same object if there were no differences.
    sources: the healthy rank by replica group.
    why: how the source was chosen.
    copied: tensors whose bytes were sent, including created tensors.
    values: plain values set or removed, and parts of a module's extra state.
    created: optimizer state missing on a rank.
    removed: optimizer state missing on the source.
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

        changes_by_verb: dict[str, Sequence[Copied | Changed]] = {
            "copied": self.copied, "set": self.values, "created": self.created, "removed": self.removed,
        }  # fmt: skip
        targets: set[int] = set()
        for change in chain(*changes_by_verb.values()):
            targets.update(change.ranks)

        origin = f"{ranks_text(sorted(set(self.sources.values())))} ({self.why})"
        all_targets = sorted(targets)
        lines = [f"resync from {origin}: {self._format_amount()}, on {ranks_text(all_targets)}; proved in sync"]
        for verb, changes in changes_by_verb.items():
            if changes:
                names = [_format_change(change, all_targets) for change in changes]
                lines.append(f"  {verb}: {names_text(names, SHOWN)}")

        return "\n".join([one_line(text) for text in lines])

    def _format_amount(self) -> str:
        """Return how many tensors, bytes and values were set."""
        size = f"{self.bytes} bytes" if self.bytes < 1000 else words.bytes_text(self.bytes)
        amount = f"{_count(self.copied, 'tensor')}, {size}"
        if self.values:
            amount += f", {_count(self.values, 'value')}"

        return amount


def _count(changes: Sequence[Copied | Changed], noun: str) -> str:
    plural = "" if len(changes) == 1 else "s"
    return f"{len(changes):,} {noun}{plural}"


def _format_change(change: Copied | Changed, all_targets: Sequence[int]) -> str:
    """Return the name of a change, with its ranks unless they are all ranks that changed."""
    if list(change.ranks) == all_targets:
        return change.name

    return f"{change.name} ({ranks_text(change.ranks)})"


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
        global rank.
    group, mesh, only, include, exclude: as in `check`, which runs before and after the repair.
    checking: other arguments of `check`, for example allow; rng has no effect.

    Raises the same error on all ranks: UsageError, before any change, without a majority, for ranks of different
    structure, and for a source outside the group; RankFailed if a rank fails during the repair, or if the ranks still
    differ afterwards. Then it is safe to call it again with the same source.
    """
    if group is None:
        group = group_of(mesh)

    channel = Channel(group)
    # A rank that raises alone would leave the other ranks waiting in the check.
    channel.run_together(lambda: _check_arguments(channel, source, only, checking))
    options = {**checking, "only": only, "include": include, "exclude": exclude, "rng": False}
    run_check = partial(check, model, optimizer, scaler, group=group, mesh=mesh, **options)
    # The report is the same on all ranks, so all of them decide alike without another message.
    before = run_check()
    if before.verdict == "in_sync":
        return Resync(before, before)

    parts = tuple(part for part in (model, optimizer, scaler) if part is not None)
    jobs, copied = channel.run_together(lambda: _repair(channel, group, parts, before, source))
    after = run_check()
    if after.verdict != "in_sync":
        raise RankFailed(_format_remaining(after))

    result = _describe_repair(before, after, source, jobs, copied)
    if channel.is_leader:
        _log_summary(result)

    return result


def _log_summary(result: Resync) -> None:
    """Log the changes of a repair."""
    # A failing handler would raise on this rank only.
    with suppress(Exception):
        logging.getLogger("syncheck").warning("%s", result.summary)


def _describe_repair(
    before: Report, after: Report, source: int | str, jobs: Sequence[Job], copied: tuple[Copied, ...]
) -> Resync:
    """Return the result of a repair. source: as in `resync`."""
    values = []
    created = []
    removed = []
    for job in jobs:
        change = Changed(job.name, job.targets)
        if job.kind != "value" and not job.sends_bytes:
            removed.append(change)
        elif job.lacks_tensor:
            created.append(Changed(job.name, job.absent))
        # Without targets, the value was None on some ranks and missing on other ranks.
        elif job.kind == "value" and job.targets:
            values.append(change)

    return Resync(
        before,
        after,
        sources={job.ranks: job.source for job in jobs},
        why=_format_choice(source, jobs),
        copied=copied,
        values=tuple(values),
        created=tuple(created),
        removed=tuple(removed),
    )


def _check_arguments(channel: Channel, source: int | str, only: Sequence[str], checking: Mapping[str, Any]) -> None:
    """Raise UsageError on all ranks for invalid arguments and for a source that differs between ranks."""
    unknown = checking.keys() - inspect.signature(check).parameters.keys()
    if unknown:
        raise UsageError(f"{min(unknown)}=: no such option of resync or of syncheck.live.check")

    _check_source(channel, source)
    if "rng" in only:
        raise UsageError("only='rng': RNG states differ by design, so resync does not change them")


def _check_source(channel: Channel, source: int | str) -> None:
    """Raise UsageError on all ranks for an invalid source, or if the ranks have different sources."""
    sources = channel.gather(source, "source")
    # repr, because the values may not be hashable.
    if len({repr(value) for value in sources.values()}) > 1:
        texts = [f"{brief(value, 20)} on rank {rank}" for rank, value in sources.items()]
        raise UsageError(f"source= differs between ranks: {names_text(texts, SHOWN)}")

    if source == MAJORITY:
        return

    # True is an int, and no rank.
    if not isinstance(source, int) or isinstance(source, bool):
        raise UsageError(f'source={brief(source)}: must be "majority" or a rank number')

    if source not in channel.ranks:
        raise UsageError(f"source={source} is not in the group; choose from {ranks_text(sorted(channel.ranks))}")


class _Offer(NamedTuple):
    """What a rank sends as the source of jobs, by names of jobs.

    sizes: of the tensors.
    entries: names of the entries of objects.
    """

    sizes: dict[str, Size]
    entries: dict[str, str]


def _repair(
    channel: Channel, group: Any, parts: tuple[Any, ...], before: Report, source: int | str
) -> tuple[tuple[Job, ...], tuple[Copied, ...]]:
    """Repair this rank together with all other ranks. Looks up every tensor and object before the first change."""
    if before.verdict != "out_of_sync":
        raise UsageError("no tensor could be compared, so there is no healthy rank to copy from")

    state, jobs = ReplicaState(parts), plan_repair(before, source)
    _check_targets(channel.rank, state, jobs)
    offer = _make_offer(state, [job for job in jobs if job.source == channel.rank], group)
    # A rank that fails up to here leaves all ranks unchanged.
    offers: dict[int, _Offer] = channel.gather(offer, "sizes")
    try:
        _exchange_entries(channel, state, jobs, offers)
        _exchange_tensors(channel, state, jobs, offers)
    except Exception as error:
        # All ranks raise the same error already.
        if channel.ended and not channel.broken:
            raise
        raise RankFailed(_format_failure(error, jobs)) from error

    copied = []
    for job in jobs:
        if job.sends_bytes:
            size, _ = offers[job.source].sizes[job.name]
            copied.append(
                Copied(
                    name=job.name,
                    source=job.source,
                    ranks=job.targets,
                    bytes=size,
                )
            )

    return jobs, tuple(copied)


def _check_targets(rank: int, state: ReplicaState, jobs: Sequence[Job]) -> None:
    """Look up everything that this rank sends or sets. Raises UsageError if it cannot."""
    for job in jobs:
        if rank not in job.ranks:
            continue

        if job.sets_entry:
            state.find_holder(job.name)
        elif _takes_part(rank, job):
            state.find_tensor(job.name, writable=rank != job.source)


def _takes_part(rank: int, job: Job) -> bool:
    """Whether a rank sends or receives the tensor of a job."""
    return rank in (job.source, *job.targets)


def _make_offer(state: ReplicaState, jobs: Sequence[Job], group: Any) -> _Offer:
    """Return what this rank sends. jobs: of which it is the source."""
    offer = _Offer({}, {})
    for job in jobs:
        if job.sends_bytes:
            offer.sizes[job.name] = get_size(state.find_tensor(job.name), group)
        if job.sets_entry:
            offer.entries[job.name] = state.find_entry(job.name)

    return offer


def _exchange_entries(channel: Channel, state: ReplicaState, jobs: Sequence[Job], offers: Mapping[int, _Offer]) -> None:
    """Replace entries of objects by the entries of the sources. Several jobs may need the same entry."""
    receivers: dict[tuple[int, str], set[int]] = defaultdict(set)
    for job in jobs:
        if job.sets_entry:
            entry = offers[job.source].entries[job.name]
            # Without targets, the value is None on some ranks and missing on other ranks.
            receivers[job.source, entry].update(job.targets or job.ranks)

    # All ranks take part in each exchange, because a collective call waits for all of them.
    for (source, entry), ranks in receivers.items():
        messages = channel.share(partial(state.dump_entry, entry), [source], "entries")
        if channel.rank in ranks - {source}:
            state.load_entry(entry, messages[source])


def _exchange_tensors(channel: Channel, state: ReplicaState, jobs: Sequence[Job], offers: Mapping[int, _Offer]) -> None:
    """Overwrite tensors with the bytes of the sources."""
    tensors = []
    for job in jobs:
        # Tensors in entries are set already.
        if job.sets_entry:
            continue

        tensor = state.find_tensor(job.name) if _takes_part(channel.rank, job) else None
        tensors.append((tensor, job.source, offers[job.source].sizes[job.name]))

    broadcast_tensors(channel, tensors)


def _format_failure(error: Exception, jobs: Sequence[Job]) -> str:
    """Return the text of the error for a repair that failed after the first change."""
    sources = {job.source for job in jobs}
    # A rank may be half repaired, so the majority may be another one at the next call.
    same_source = f"source={min(sources)}" if len(sources) == 1 else "the same source"
    failure = f"resync failed during the repair: {describe_error(error)}"[:300]
    return f"{failure}. Some tensors may be copied already; calling it again with {same_source} is safe"


def _format_choice(source: int | str, jobs: Sequence[Job]) -> str:
    """Return how the source was chosen. The smallest majority of all jobs counts."""
    if isinstance(source, int):
        return "chosen by the caller"

    majorities = [(len(job.majority), len(job.ranks)) for job in jobs]
    agreeing, ranks = min(majorities, default=(0, 0))
    return f"majority of {agreeing} of {ranks}"


def _format_remaining(after: Report) -> str:
    group = after.groups[0]
    names = []
    for diff in group.tensors:
        if diff.out_of_sync:
            names.append(diff.name)

    for value in group.values:
        if value.counts:
            names.append(value.name)

    return (
        f"still out of sync after resync: {names_text(names, SHOWN)}; possible causes: state_dict() returns copies "
        "that load_state_dict() ignores, tensors are tied on some ranks only, or new differences have appeared"
    )
