"""Join groups with different ranks of one run: a folder per host, or a file under another name.

Separate groups would each be in sync, and the hosts would not be compared with each other.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import partition_by, rank_in_path, rank_of, template_of, title_of
from syncheck.layout.names import split_path
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from syncheck.layout.groups import ReplicaGroup


def join_hosts(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Join groups with known ranks if no rank repeats.

    First join groups whose paths differ only in the rank, or in the rank and one folder (the host). Then join a group
    of the same run by metadata, or a single file, with the only group that lacks its ranks.
    """
    depth = max((template_of(g.ranks[0][1]).count("/") for g in groups), default=0)
    for opened in (None, *range(depth)):
        joined: list[ReplicaGroup] = []
        for key, same_path in partition_by(groups, lambda g, at=opened: _path_key(g, at)).items():  # type: ignore[misc]
            # An older step in a file is a finding, not another group, unless ranks repeat.
            parts = [same_path] if _can_join(same_path) else partition_by(same_path, lambda g: g.step).values()
            for part in parts:
                joined += [_join(part, opened)] if key is not None and _can_join(part) else part
        groups = joined
    return _join_leftovers(groups)


def _path_key(group: ReplicaGroup, opened: int | None) -> Hashable | None:
    """Return the path template of a group with one folder left open, counted from the file's own."""
    if _list_ranks([group]) is None:
        return None
    segments = template_of(group.ranks[0][1]).split("/")
    if opened is not None:
        if opened > len(segments) - 2:
            return None
        segments[-2 - opened] = "*"
    return tuple(segments)


def _can_join(groups: Sequence[ReplicaGroup]) -> bool:
    """Whether several groups are of one run and have no rank in common."""
    runs = {(group.run, group.run_id) for group in groups if _has_metadata(group)}
    return len(groups) > 1 and len(runs) < 2 and _list_ranks(groups) is not None


def _list_ranks(groups: Sequence[ReplicaGroup]) -> list[int] | None:
    """Return the ranks of all members if none repeats: by metadata, else by name (for copied files)."""
    members = [pair for group in groups for pair in group.ranks]
    known = [rank for rank, snapshot in members if rank_of(snapshot) == rank]
    ranks_in_paths = [rank for _, snapshot in members if (rank := rank_in_path(snapshot)) is not None]
    for ranks in (known, ranks_in_paths):
        if len(ranks) == len(set(ranks)) == len(members):
            return ranks
    return None


def _has_metadata(group: ReplicaGroup) -> bool:
    return any(s.metadata is not None and s.metadata.rank is not None for _, s in group.ranks)


def _join(groups: Sequence[ReplicaGroup], opened: int | None = None) -> ReplicaGroup:
    """Join groups into a single group. opened: level of the host's folder, counted from the file's own folder."""
    first = next(filter(_has_metadata, groups), groups[0])
    members = []
    snapshots = [snapshot for group in groups for _, snapshot in group.ranks]
    for rank, snapshot in sorted(zip(_list_ranks(groups) or (), snapshots, strict=True), key=lambda pair: pair[0]):
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
                continue  # the other group of a pair is tried instead
            others = [other for other in groups if other is not group and _belong_together(group, other)]
            if others and _can_join([group, *others]):
                groups = [g for g in groups if g is not group and g not in others]
                groups.append(_join([group, *others]))
                break
        else:
            return groups


def _belong_together(group: ReplicaGroup, other: ReplicaGroup) -> bool:
    """Whether two groups have no rank in common and belong to one run, by the metadata or for lack of any."""
    if not _can_join([group, other]):
        return False
    fixed = [split_path(g.ranks[0][1].path).fixed() for g in (group, other)]
    if _has_metadata(group) and _has_metadata(other):
        return fixed[0] == fixed[1] or (group.step is not None and group.step == other.step)
    alone = 1 in (len(group.ranks), len(other.ranks))
    return alone and fixed[0] == fixed[1] and not _has_metadata(group) and not _has_metadata(other)
