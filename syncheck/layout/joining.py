"""Join groups with different ranks of one step of one run: a folder for each host, or a file under another name.

Separate groups would each be in sync, and no host would be compared with another.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import classes, rank_by_name, rank_of, template_of, title_of
from syncheck.layout.names import take_apart
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from syncheck.layout.groups import ReplicaGroup


def join_hosts(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Join groups with known ranks if no rank repeats.

    First, groups whose paths differ only in the rank, or in the rank and one folder (the host). Then a group of the
    same run by its metadata, or a single file, joins the only group without its ranks.
    """
    depth = max((template_of(g.ranks[0][1]).count("/") for g in groups), default=0)
    for opened in (None, *range(depth)):
        joined: list[ReplicaGroup] = []
        for key, alike in classes(groups, lambda g, at=opened: _key(g, at)).items():  # type: ignore[misc]
            # An older step in a file is a finding, not another group, unless ranks repeat.
            parts = [alike] if _fit(alike) else classes(alike, lambda g: g.step).values()
            for part in parts:
                joined += [_joined(part, opened)] if key is not None and _fit(part) else part
        groups = joined
    return _join_leftovers(groups)


def _key(group: ReplicaGroup, opened: int | None) -> Hashable | None:
    """Return the path template of a group with one folder left open, counted from the file's own."""
    if _ranks([group]) is None:
        return None
    segments = template_of(group.ranks[0][1]).split("/")
    if opened is not None:
        if opened > len(segments) - 2:
            return None
        segments[-2 - opened] = "*"
    return tuple(segments)


def _fit(groups: Sequence[ReplicaGroup]) -> bool:
    """Whether groups may be one: several, of one run, no rank twice."""
    runs = {(group.run, group.run_id) for group in groups if _has_metadata(group)}
    return len(groups) > 1 and len(runs) < 2 and _ranks(groups) is not None


def _ranks(groups: Sequence[ReplicaGroup]) -> list[int] | None:
    """Return the ranks of all members if none repeats: by metadata, else by name (for copied files)."""
    members = [pair for group in groups for pair in group.ranks]
    known = [rank for rank, snapshot in members if rank_of(snapshot) == rank]
    named = [rank for _, snapshot in members if (rank := rank_by_name(snapshot)) is not None]
    for ranks in (known, named):
        if len(ranks) == len(set(ranks)) == len(members):
            return ranks
    return None


def _has_metadata(group: ReplicaGroup) -> bool:
    return any(s.metadata is not None and s.metadata.rank is not None for _, s in group.ranks)


def _joined(groups: Sequence[ReplicaGroup], opened: int | None = None) -> ReplicaGroup:
    """Join groups to one. opened: which folder, from the file's own upward, is the host."""
    first = next(filter(_has_metadata, groups), groups[0])
    members = []
    snapshots = [snapshot for group in groups for _, snapshot in group.ranks]
    for rank, snapshot in sorted(zip(_ranks(groups) or (), snapshots, strict=True), key=lambda pair: pair[0]):
        host = snapshot.host
        if host is None and opened is not None:
            host = os.path.dirname(snapshot.path).split("/")[-1 - opened]
        members.append((rank, replace(snapshot, host=host)))
    grouping = first.grouping
    if opened is not None:
        grouping += (Grouping.FOLDERS_ARE_HOSTS(),)
    unnamed = [rank for group in groups if not _has_metadata(group) for rank, _ in group.ranks]
    if _has_metadata(first) and unnamed:
        grouping += (Grouping.SOME_BY_NAME(ranks=tuple(sorted(unnamed))),)
    run = first.run
    if opened is not None and not _has_metadata(first):
        segments = template_of(members[0][1]).split("/")
        segments[-2 - opened] = "*"
        run = title_of("/".join(segment for segment in segments if segment != str(first.step)))
    steps = [group.step for group in groups if group.step is not None]
    return replace(first, run=run, step=max(steps, default=None), ranks=tuple(members), grouping=grouping)


def _join_leftovers(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Join each group, and each single file, with the only other group of its run that lacks its ranks."""
    while True:
        for group in groups:
            if any(rank == 0 for rank, _ in group.ranks):
                continue  # of two groups to join, at most one has rank 0; the other one is tried
            others = [other for other in groups if other is not group and _belong(group, other)]
            if others and _fit([group, *others]):
                groups = [g for g in groups if g is not group and g not in others]
                groups.append(_joined([group, *others]))
                break
        else:
            return groups


def _belong(group: ReplicaGroup, other: ReplicaGroup) -> bool:
    """Whether two groups have no rank in common and belong to one run, by the metadata or for lack of any."""
    if not _fit([group, other]):
        return False
    fixed = [take_apart(g.ranks[0][1].path).fixed() for g in (group, other)]
    if _has_metadata(group) and _has_metadata(other):
        return fixed[0] == fixed[1] or (group.step is not None and group.step == other.step)
    alone = 1 in (len(group.ranks), len(other.ranks))
    return alone and fixed[0] == fixed[1] and not _has_metadata(group) and not _has_metadata(other)
