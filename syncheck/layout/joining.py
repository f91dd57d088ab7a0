"""Join groups with different ranks of one run: a folder for each host, or a file under another name.

Separate groups would each be in sync, and the hosts would not be compared with each other.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import (
    are_unique,
    has_rank_in_metadata,
    partition_by,
    rank_in_path,
    rank_of,
    template_of,
    title_of,
)
from syncheck.layout.path_numbers import split_path
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.layout.groups import ReplicaGroup
    from syncheck.snapshots import Snapshot


def join_hosts(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Join groups with known ranks if no rank repeats.

    First join groups whose paths differ only in the rank, or in the rank and one folder (the host). Then join a group
    of the same run by metadata, or a single file, with the only group that lacks its ranks.
    """
    depth = 0
    for group in groups:
        depth = max(depth, _get_template(group).count("/"))

    # Equal folders first: a folder that may differ joins more groups.
    groups = _join_by_path(groups, None)
    for level in range(depth):
        groups = _join_by_path(groups, level)

    return _join_leftovers(groups)


def _get_template(group: ReplicaGroup) -> str:
    _, first = group.ranks[0]
    return template_of(first)


def _join_by_path(groups: Sequence[ReplicaGroup], level: int | None) -> list[ReplicaGroup]:
    """Join the groups with equal paths.

    level: of the folder that may differ, counted from the file's own folder; None if all folders must be equal.
    """
    joined: list[ReplicaGroup] = []
    for path, candidates in partition_by(groups, lambda group: _star_folder(group, level)).items():
        # Groups whose ranks are unknown or repeat have no path in common.
        if path is None:
            joined += candidates
        elif _can_join(candidates):
            joined.append(_join(candidates, level))
        else:
            # An older step in a file is a finding, not another group, unless ranks repeat.
            for groups_of_step in partition_by(candidates, lambda group: group.step).values():
                if _can_join(groups_of_step):
                    joined.append(_join(groups_of_step, level))
                else:
                    joined += groups_of_step

    return joined


def _star_folder(group: ReplicaGroup, level: int | None) -> str | None:
    """Return the path template of a group with `*` for one folder; None if its ranks are unknown.

    level: as in `_join_by_path`.
    """
    if _list_ranks([group]) is None:
        return None

    segments = _get_template(group).split("/")
    if level is None:
        return "/".join(segments)

    if level > len(segments) - 2:
        return None

    segments[-2 - level] = "*"
    return "/".join(segments)


def _can_join(groups: Sequence[ReplicaGroup]) -> bool:
    """Whether several groups are of one run and have no rank in common."""
    runs = {(group.run, group.run_id) for group in groups if _has_metadata(group)}
    return len(groups) > 1 and len(runs) < 2 and _list_ranks(groups) is not None


def _list_ranks(groups: Iterable[ReplicaGroup]) -> list[int] | None:
    """Return the ranks of all members if none repeats: by metadata, else by name (for copied files)."""
    known_ranks: list[int] = []
    ranks_in_paths: list[int] = []
    size = 0
    for group in groups:
        size += len(group.ranks)
        for rank, snapshot in group.ranks:
            if rank_of(snapshot) == rank:
                known_ranks.append(rank)

            rank_by_name = rank_in_path(snapshot)
            if rank_by_name is not None:
                ranks_in_paths.append(rank_by_name)

    for ranks in (known_ranks, ranks_in_paths):
        if len(ranks) == size and are_unique(ranks):
            return ranks

    return None


def _has_metadata(group: ReplicaGroup) -> bool:
    return any(has_rank_in_metadata(snapshot) for _, snapshot in group.ranks)


def _join(groups: Sequence[ReplicaGroup], level: int | None = None) -> ReplicaGroup:
    """Join groups into a single group.

    level: of the host's folder, as in `_join_by_path`; None if the groups are not of several hosts.
    """
    # Metadata names the run better than a path.
    first = groups[0]
    for group in groups:
        if _has_metadata(group):
            first = group
            break

    by_rank: dict[int, Snapshot] = {}
    snapshots = [snapshot for group in groups for _, snapshot in group.ranks]
    for rank, snapshot in zip(_list_ranks(groups) or (), snapshots, strict=True):
        host = snapshot.host
        if host is None and level is not None:
            host = os.path.dirname(snapshot.path).split("/")[-1 - level]

        by_rank[rank] = replace(snapshot, host=host)

    members = tuple(sorted(by_rank.items()))
    grouping = first.grouping
    run = first.run
    if level is not None:
        grouping += (Grouping.FOLDERS_ARE_HOSTS(),)
        if not _has_metadata(first):
            run = _name_joined_run(members[0][1], level, first.step)

    if _has_metadata(first):
        unnamed_ranks: list[int] = []
        for group in groups:
            if not _has_metadata(group):
                unnamed_ranks += [rank for rank, _ in group.ranks]

        if unnamed_ranks:
            grouping += (Grouping.SOME_BY_NAME(ranks=tuple(sorted(unnamed_ranks))),)

    step = max((group.step for group in groups if group.step is not None), default=None)
    return replace(first, run=run, step=step, ranks=members, grouping=grouping)


def _name_joined_run(snapshot: Snapshot, level: int, step: int | None) -> str:
    """Return the name of a run without the folder of the host, and without the folder of the step."""
    segments = template_of(snapshot).split("/")
    segments[-2 - level] = "*"
    return title_of("/".join(segment for segment in segments if segment != str(step)))


def _join_leftovers(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Join each group, and each single file, with the only other group of its run that lacks its ranks."""
    while True:
        joined = _join_first_leftover(groups)
        if joined is None:
            return groups

        groups = joined


def _join_first_leftover(groups: list[ReplicaGroup]) -> list[ReplicaGroup] | None:
    """Join one group with the other groups of its run; None if no groups belong together."""
    for group in groups:
        # For a pair, the group without rank 0 is tried.
        if any(rank == 0 for rank, _ in group.ranks):
            continue

        partners: list[ReplicaGroup] = []
        unrelated: list[ReplicaGroup] = []
        for candidate in groups:
            if candidate is group:
                continue

            if _belong_together(group, candidate):
                partners.append(candidate)
            else:
                unrelated.append(candidate)

        if partners and _can_join([group, *partners]):
            return [*unrelated, _join([group, *partners])]

    return None


def _belong_together(group: ReplicaGroup, candidate: ReplicaGroup) -> bool:
    """Whether two groups have no rank in common and belong to one run, by the metadata or for lack of any."""
    if not _can_join([group, candidate]):
        return False

    first, second = (split_path(each_group.ranks[0][1].path).fixed() for each_group in (group, candidate))
    if _has_metadata(group) and _has_metadata(candidate):
        return first == second or (group.step is not None and group.step == candidate.step)

    if _has_metadata(group) or _has_metadata(candidate):
        return False

    # Two groups of several files are more likely two runs.
    is_single = len(group.ranks) == 1 or len(candidate.ranks) == 1
    return is_single and first == second
