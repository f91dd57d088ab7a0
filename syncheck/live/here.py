"""Compare things within one process, each a replica: modules, state dicts, bundles, and files beside them."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.api import GroupedCheckpoints, Options, find, judge
from syncheck.comparison import reference
from syncheck.errors import UsageError
from syncheck.layout.groups import ReplicaGroup
from syncheck.live.channel import world_size
from syncheck.live.memory import agree_on_buffers, snapshot
from syncheck.live.memory.things import has_module, is_module, is_optimizer, title_of
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Report, Unreadable
    from syncheck.snapshots import Snapshot

NOTHING = "nothing given to compare; needs paths of checkpoints, or modules, state dicts and the like"


def compare_here(things: Sequence[Any], options: Options) -> Report:
    """Compare things of this process. Ranks are their positions.

    things: each one replica: what `memory.snapshot` takes, or the path of one file. A file that cannot be read does
    not raise: it is listed, and the verdict is then never "in sync". Raises UsageError for fewer than two things, for
    a module beside an optimizer, and for a path of anything but one file.
    """
    _check(things)
    # A state dict or a file cannot hold the buffers that a module does not save.
    persistent = not all(map(has_module, things))
    ranked: dict[int, Snapshot] = {}
    unreadable: list[Unreadable] = []
    for i, thing in enumerate(things):
        if not isinstance(thing, (str, os.PathLike)):
            ranked[i] = snapshot(thing, path=f"things[{i}], {title_of(thing)}", persistent=persistent)
            continue
        there = find(thing, options=replace(options, reference=None))
        opened = [snapshot for replicas in there.groups for _, snapshot in replicas.ranks]
        if len(opened) + len(there.unreadable) != 1:
            raise UsageError(
                f"{os.fspath(thing)}: {len(opened)} checkpoints; beside things in memory, a path has to be of one file"
            )
        ranked.update((i, taken) for taken in opened)
        unreadable += there.unreadable
    agreed = tuple(zip(ranked, agree_on_buffers(ranked.values()), strict=True))
    groups = (ReplicaGroup("model", None, agreed, (Grouping.MEMORY(),)),) if agreed else ()
    reference.check(options.reference, groups, unreadable)
    return judge(GroupedCheckpoints(groups, tuple(unreadable)), options)


def _check(things: Sequence[Any]) -> None:
    if not things:
        raise UsageError(NOTHING)
    if len(things) < 2:
        where = "in a process group of one rank" if world_size() == 1 else "outside a process group"
        raise UsageError(
            f"one thing to compare, {where}: needs two or more, each a replica; in a process group of several ranks, "
            "the things are this rank's replica"
        )
    if any(map(is_module, things)) and any(map(is_optimizer, things)):
        raise UsageError(
            "a module and an optimizer are no replicas of one another; outside a process group each thing is one "
            "replica: give tuples, as in assert_in_sync((model, optimizer), (other_model, other_optimizer))"
        )
