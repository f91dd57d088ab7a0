"""Join groups with different ranks of one run: a folder for each host, or a file under another name.

Separate groups would each be in sync, and the hosts would not be compared with each other.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.layout.groups import (
    find_last_step,
    list_known,
    partition_by,
    rank_in_path,
    rank_of,
    template_of,
    title_of,
)
from syncheck.layout.path_numbers import split_path
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.layout.path_numbers import Role
    from syncheck.snapshots import Snapshot

_LOCAL_RANK = r"(?i)(?:^|[^a-z])local[-_]?rank"


def join_hosts(groups: list[CheckpointGroup]) -> list[CheckpointGroup]:
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

    return _mark_possible_hosts(_join_leftovers(groups))


def _mark_possible_hosts(groups: list[CheckpointGroup]) -> list[CheckpointGroup]:
    """State that groups in several folders may be of several hosts: their files have the same local ranks."""
    marked = list(groups)
    positions_by_files: dict[Hashable, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        name = os.path.basename(_get_template(group))
        if re.search(_LOCAL_RANK, name):
            ranks = tuple(dict(group.ranks))
            positions_by_files[name, ranks, group.step].append(position)

    for positions in positions_by_files.values():
        # One host has each local rank once.
        if len(positions) > 1:
            for position in positions:
                grouping = (*groups[position].grouping, Grouping.PERHAPS_HOSTS())
                marked[position] = replace(groups[position], grouping=grouping)

    return marked


def _get_template(group: CheckpointGroup) -> str:
    _, first = group.ranks[0]
    return template_of(first)


def _join_by_path(groups: Sequence[CheckpointGroup], level: int | None) -> list[CheckpointGroup]:
    """Join the groups with equal paths.

    level: of the folder that may differ, counted from the file's own folder; None if all folders must be equal.
    """
    joined: list[CheckpointGroup] = []
    for path, candidates in partition_by(groups, partial(_star_folder, level=level)).items():
        # Groups whose ranks are unknown or repeat have no path in common.
        if path is None:
            joined += candidates
        elif _can_join(candidates):
            joined.append(_join(candidates, level))
        else:
            joined += _join_by_step(candidates, level)

    return joined


def _join_by_step(groups: Sequence[CheckpointGroup], level: int | None) -> list[CheckpointGroup]:
    """Join the groups of each step. An older step in a file is a finding, not another group, unless ranks repeat."""
    joined: list[CheckpointGroup] = []
    for groups_of_step in partition_by(groups, attrgetter("step")).values():
        if _can_join(groups_of_step):
            joined.append(_join(groups_of_step, level))
        else:
            joined += groups_of_step

    return joined


def _star_folder(group: CheckpointGroup, level: int | None) -> str | None:
    """Return the path template of a group with `*` for one folder; None if its ranks are unknown.

    level: as in `_join_by_path`.
    """
    if _list_ranks([group]) is None:
        return None

    template = _get_template(group)
    if level is None:
        return template

    # The last segment is the name of the file.
    segments = template.split("/")
    if level > len(segments) - 2:
        return None

    segments[-2 - level] = "*"
    return "/".join(segments)


def _can_join(groups: Sequence[CheckpointGroup]) -> bool:
    """Whether several groups are of one run and have no rank in common."""
    runs = {(group.run, group.run_id) for group in groups if group.has_metadata}
    if len(groups) < 2 or len(runs) > 1:
        return False

    return _list_ranks(groups) is not None


def _list_ranks(groups: Iterable[CheckpointGroup]) -> list[int] | None:
    """Return the ranks of all members if none repeats: by metadata, else by name (for copied files)."""
    members = _list_members(groups)
    known_ranks = [rank for rank, snapshot in members if rank_of(snapshot) == rank]
    ranks_in_paths = list_known(rank_in_path(snapshot) for _, snapshot in members)
    for ranks in (known_ranks, ranks_in_paths):
        if len(set(ranks)) == len(members):
            return ranks

    return None


def _list_members(groups: Iterable[CheckpointGroup]) -> list[tuple[int, Snapshot]]:
    """Return the members of all groups with their ranks."""
    members: list[tuple[int, Snapshot]] = []
    for group in groups:
        members += group.ranks

    return members


def _join(groups: Sequence[CheckpointGroup], level: int | None = None) -> CheckpointGroup:
    """Join groups into a single group.

    level: of the host's folder, as in `_join_by_path`; None if the groups are not of several hosts.
    """
    by_source = partition_by(groups, attrgetter("has_metadata"))
    described_groups = by_source[True]
    named_groups = by_source[False]
    # Metadata names the run better than a path.
    first, *_ = described_groups + named_groups
    ranks = _list_ranks(groups)
    assert ranks is not None
    by_rank: dict[int, Snapshot] = {}
    for rank, (_, snapshot) in zip(ranks, _list_members(groups), strict=True):
        host = snapshot.host
        if host is None and level is not None:
            host = os.path.dirname(snapshot.path).split("/")[-1 - level]

        by_rank[rank] = replace(snapshot, host=host)

    members = tuple(sorted(by_rank.items()))
    grouping = first.grouping
    run = first.run
    if level is not None:
        grouping += (Grouping.FOLDERS_ARE_HOSTS(),)
        if not described_groups:
            run = _name_joined_run(members[0][1], level, first.step)

    if described_groups and named_groups:
        named_ranks = [rank for rank, _ in _list_members(named_groups)]
        grouping += (Grouping.SOME_BY_NAME(ranks=tuple(sorted(named_ranks))),)

    step = find_last_step(group.step for group in groups)
    return replace(
        first,
        run=run,
        step=step,
        ranks=members,
        grouping=grouping,
    )


def _name_joined_run(snapshot: Snapshot, level: int, step: int | None) -> str:
    """Return the name of a run without the folder of the host, and without the folder of the step."""
    segments = template_of(snapshot).split("/")
    segments[-2 - level] = "*"
    other_segments = [segment for segment in segments if segment != str(step)]
    return title_of("/".join(other_segments))


def _join_leftovers(groups: list[CheckpointGroup]) -> list[CheckpointGroup]:
    """Join each group, and each single file, with the only other group of its run that lacks its ranks."""
    while True:
        joined = _join_first_leftover(groups)
        if joined is None:
            return groups

        groups = joined


def _join_first_leftover(groups: list[CheckpointGroup]) -> list[CheckpointGroup] | None:
    """Join one group with the other groups of its run; None if no groups belong together."""
    for group in groups:
        # For a pair, the group without rank 0 is tried.
        if 0 in dict(group.ranks):
            continue

        partners = [candidate for candidate in groups if _belong_together(group, candidate)]
        if _can_join([group, *partners]):
            unrelated = list(groups)
            for joined_group in (group, *partners):
                unrelated.remove(joined_group)

            return [*unrelated, _join([group, *partners])]

    return None


def _belong_together(group: CheckpointGroup, candidate: CheckpointGroup) -> bool:
    """Whether two groups have no rank in common and belong to one run, by the metadata or for lack of any."""
    is_described = group.has_metadata
    if is_described != candidate.has_metadata or not _can_join([group, candidate]):
        return False

    have_equal_paths = _get_moment(group) == _get_moment(candidate)
    if is_described:
        # The step in the metadata proves it, whatever the folder of a copied file.
        have_equal_steps = group.step is not None and group.step == candidate.step
        return have_equal_paths or have_equal_steps

    # Two groups of several files are more likely two runs.
    smaller_size = min(len(group.ranks), len(candidate.ranks))
    return have_equal_paths and smaller_size == 1


def _get_moment(group: CheckpointGroup) -> tuple[tuple[Role, int], ...]:
    """Return the step and the part of the checkpoint in the path of a group."""
    _, first = group.ranks[0]
    return split_path(first.path).list_common()
