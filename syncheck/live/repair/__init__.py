"""Repair a job whose ranks have come apart: copy what differs from a healthy rank, and prove it by another check.

resync(model, optimizer, scaler)                # from a rank that the majority agrees with
resync(model, optimizer, scaler, source=0)      # from rank 0, whatever the others hold
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.errors import RankFailed, SyncheckError, UsageError, brief
from syncheck.live.channel import Channel
from syncheck.live.checks import check, eager, group_of
from syncheck.live.repair.copying import Copier
from syncheck.live.repair.done import Changed, Copied, Resync
from syncheck.live.repair.places import Places
from syncheck.live.repair.plan import MAJORITY, named, planned
from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.live.repair.places import Content
    from syncheck.live.repair.plan import Plan
    from syncheck.records import Report


__all__ = ["Resync", "resync"]


@eager
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
    """Make the model of every rank that of a healthy one, in place, and prove it; return what was done.

    A collective call: every rank of the group has to make it, between `optimizer.step()` and the next forward.
    Parameters, buffers and optimizer state are overwritten bit by bit where they differ; learning rates, the scaler's
    state and other values are set; optimizer state that a rank lacks is created, and what it has more is removed.
    Random number generators and gradients are left alone. No parameter is replaced by another object.

    source: "majority", the ranks in the largest set, of more than half, of every tensor that differs; or the rank, of
    the whole world, whose model is the right one. group, mesh, only, include, exclude: as `check` has them, which is
    called before and after. checking: its other arguments, such as allow; with rng=True nothing else is done than
    without.

    Raises, on all ranks and with one text: UsageError, before anything is changed, where there is no majority, where
    the ranks differ in structure, and for a source that is no rank of the group; RankFailed where a rank failed on
    the way, or where the ranks still differ afterwards. It can then be called again with the same source.
    """
    group = group_of(mesh) if group is None else group
    channel = Channel(group)
    parts = tuple(part for part in (model, optimizer, scaler) if part is not None)
    channel.together(lambda: _agree(channel, source, only))

    def compared() -> Report:
        names: dict[str, Any] = {"only": only, "include": include, "exclude": exclude}
        return check(model, optimizer, scaler, group=group, mesh=mesh, **names, **{**checking, "rng": False})

    before = compared()
    if before.verdict == "in_sync":
        return Resync(before, before)
    repair = _Repair(channel, group, parts, before, source)
    try:
        done = channel.together(repair.run)
    except RankFailed as error:
        if repair.begun and _FAILED not in str(error):  # no message comes through any more
            raise RankFailed(f"{_FAILED}, and some tensors may be copied and others not: {error}") from error
        raise
    after = compared()
    if after.verdict != "in_sync":
        raise RankFailed(_remaining(after, done))
    found = Resync(before, after, done.plan.sources, done.plan.why, done.copied, *done.changed)
    if channel.rank == min(channel.ranks):
        with suppress(Exception):  # a handler may fail, and this rank would raise alone
            logging.getLogger("syncheck").warning("%s", found.summary)
    return found


@dataclass(frozen=True)
class _Done:
    plan: Plan
    copied: tuple[Copied, ...]
    changed: tuple[tuple[Changed, ...], ...]


def _agree(channel: Channel, source: int | str, only: Sequence[str]) -> None:
    """Raise UsageError, on all ranks, for a source that is none or not the same everywhere."""
    asked = channel.gather(source, "source")
    if len({repr(found) for found in asked.values()}) > 1:
        told = ", ".join(f"{brief(found, 20)} on rank {rank}" for rank, found in list(asked.items())[:4])
        raise UsageError(f"source= is not the same on all ranks: {told}")
    is_rank = isinstance(source, int) and not isinstance(source, bool)
    if source != MAJORITY and not is_rank:
        raise UsageError(f'source={brief(source)}: needs "majority" or the number of a rank')
    if is_rank and source not in channel.ranks:
        raise UsageError(f"source={source} is no rank of the group; needs one of {ranks_text(sorted(channel.ranks))}")
    if "rng" in only:
        raise UsageError("only='rng': random number states are a rank's own, and resync leaves them alone")


_FAILED = "resync failed on the way"
_AGAIN = ". Some tensors may be copied and others not; calling it again with {} is safe"


@dataclass
class _Repair:
    """One repair of this rank, with all others. begun: something may have been changed."""

    channel: Channel
    group: Any
    parts: tuple[Any, ...]
    before: Report
    source: int | str
    begun: bool = False

    def run(self) -> _Done:
        """Make the plan, find everything that it names, and only then change something."""
        if self.before.verdict != "out_of_sync":
            raise UsageError("nothing could be compared, so that there is nothing to tell a healthy rank by")
        rank, places = self.channel.rank, Places(self.parts)
        plan = planned(self.before, self.source, places.groups)
        mine = [leaf for leaf in plan.leaves if rank in leaf.ranks]
        for leaf in mine:
            places.known(leaf.name)
        created = {leaf.name for leaf in mine}
        for job in plan.jobs:
            if rank in job.ranks and job.name not in created:
                places.require(job.name, writable=rank != job.source)
        received = [job.name for job in plan.jobs if rank in job.ranks and rank != job.source]
        ties = self.channel.gather(places.ties(received), "places")
        if any(ties.values()):
            self._check_ties(plan, places, ties)
            self.channel.gather(None, "ties")
        # Up to here a rank may have failed alone; from here on only some send.

        def contents() -> dict[str, Content]:
            return {leaf.name: places.content(leaf.name, held=leaf.held) for leaf in mine if leaf.source == rank}

        try:
            sent = self.channel.share(contents, sorted({leaf.source for leaf in plan.leaves}), "values")
            self.begun = True
            return self._carry_out(plan, places, sent)
        except Exception as error:
            if self.channel.over:  # another rank's error is told as it is
                raise
            kind = "" if isinstance(error, SyncheckError) else f"{type(error).__name__}: "
            raise SyncheckError(f"{_FAILED}: {kind}{error}"[:300] + _AGAIN.format(_text(plan))) from error

    def _check_ties(self, plan: Plan, places: Places, ties: Mapping[int, Mapping[str, Sequence[str]]]) -> None:
        """Raise UsageError where a rank has tied two tensors that differ on the source: one memory cannot hold both."""
        for job in plan.jobs:
            for target in job.ranks if job.source == self.channel.rank else ():
                for other in ties[target].get(job.name, ()):
                    if not places.alike(job.name, other):
                        raise UsageError(
                            f"{job.name} and {other} are one tensor on rank {target} and differ on rank {job.source}: "
                            "tie them on all ranks or on none, and call it again"
                        )

    def _carry_out(self, plan: Plan, places: Places, sent: Mapping[int, Mapping[str, Content]]) -> _Done:
        torch: Any = sys.modules["torch"]
        rank, own = self.channel.rank, {}
        with torch.no_grad():
            for leaf in plan.leaves:
                if rank in leaf.ranks and rank != leaf.source:
                    own[leaf.name] = places.take(leaf.name, sent[leaf.source][leaf.name])
            sizes = Copier(self.channel, self.group).copy(plan.jobs, places.live)
        changes = self.channel.gather(own, "changes")
        copied = [Copied(job.name, job.source, job.targets, size) for job, size in zip(plan.jobs, sizes, strict=True)]
        return _Done(plan, tuple(copied), tuple(_changed(changes, kind) for kind in ("values", "created", "removed")))


def _text(plan: Plan) -> str:
    sources = sorted(set(plan.sources.values()))
    return f"source={sources[0]}" if len(sources) == 1 else "the same source"


def _changed(changes: Mapping[int, Mapping[str, str]], kind: str) -> tuple[Changed, ...]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(changes):
        for name, change in changes[rank].items():
            if change == kind:
                ranks[name].append(rank)
    return tuple(Changed(name, tuple(of)) for name, of in ranks.items())


def _remaining(after: Report, done: _Done) -> str:
    group = after.groups[0]
    names = [diff.name for diff in group.tensors if diff.out_of_sync] + [v.name for v in group.values if v.counts]
    copied = {of.name for of in done.copied} & set(names)
    why = (
        "what was copied there is no live tensor: a state_dict() gives copies"
        if copied
        else "they came apart again, or in another place"
    )
    return f"still out of sync after a resync from {_text(done.plan)}: {named(names)}; {why}"
