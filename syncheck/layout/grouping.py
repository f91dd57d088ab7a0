"""Group the files of replicas.

The criteria, in this order: metadata blocks; folders that are copies of each other; ranks in known names; the only
varying number of otherwise equal names; or else all files form one group. The criterion is recorded and
printed.

Then groups with different ranks of one run are joined: a folder per host, or a file under another name. Separate groups
would each be in sync, and the hosts would not be compared with each other.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from syncheck.layout.groups import (
    Ranked,
    ReplicaGroup,
    group_by_metadata,
    make_names_unique,
    number_replicas,
    partition_by,
    rank_in_path,
    rank_of,
    template_of,
    title_of,
)
from syncheck.layout.path_numbers import PathNumbers, split_path
from syncheck.layout.refining import refine_paths
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.layout.path_numbers import Role
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot


def group_replicas(
    snapshots: Sequence[Snapshot],
    group_by: str | None = None,
    roots: Mapping[str, str] | None = None,
    alike: Mapping[str, str] | None = None,
) -> tuple[ReplicaGroup, ...]:
    """Group the snapshots of replicas, ordered by run and step.

    group_by: a regular expression searched in each path. Files with equal captured groups, or equal matches without
    captured groups, form one group. roots: the folder in which a file was found, if the user passed a folder. alike: a
    uniform spelling of each path, if relative and absolute paths are mixed.
    Every snapshot is in exactly one group. Raises re.error for an invalid expression.
    """
    if group_by is None and alike is not None and any(path != alike[path] for path in alike):
        # Group by the uniform paths, but return the user's paths.
        given = {alike[s.path]: s.path for s in snapshots}
        folders = {alike[path]: alike[folder] for path, folder in (roots or {}).items() if path in alike}
        found = group_replicas([replace(s, path=alike[s.path]) for s in snapshots], None, folders)
        return tuple(
            replace(g, ranks=tuple((rank, replace(s, path=given[s.path])) for rank, s in g.ranks)) for g in found
        )
    ordered = [replace(s, host=split_path(s.path).host) for s in sorted(snapshots, key=lambda s: _natural_key(s.path))]
    if group_by is not None:
        groups = _group_by_expression(ordered, re.compile(group_by))
    else:
        described = [s for s in ordered if s.metadata is not None and s.metadata.rank is not None]
        plain = [s for s in ordered if s.metadata is None or s.metadata.rank is None]
        copies = _group_copies(plain, roots or {})
        groups = join_hosts(group_by_metadata(described) + ([] if copies else _group_by_names(plain))) + copies
    return tuple(sorted(make_names_unique(groups), key=lambda r: (r.run, r.step if r.step is not None else -1)))


def _natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that places rank_10 after rank_9."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if i % 2 else (1, 0, part) for i, part in enumerate(parts)]


def _group_by_expression(snapshots: Iterable[Snapshot], pattern: re.Pattern[str]) -> list[ReplicaGroup]:
    def key(snapshot: Snapshot) -> tuple[str, ...]:
        match = pattern.search(snapshot.path)
        return (match.groups("") or (match.group(),)) if match else ("no match", snapshot.path)

    grouping = (Grouping.EXPRESSION(pattern=pattern.pattern),)
    return [
        ReplicaGroup("-".join(k), None, number_replicas(members), grouping)
        for k, members in partition_by(snapshots, key).items()
    ]


def _group_copies(snapshots: list[Snapshot], roots: Mapping[str, str]) -> list[ReplicaGroup]:
    """Group folders with equal relative paths, which are copies of each other, path by path.

    Files with one name in several folders are treated likewise if the folders' names differ in words.
    """
    given = [split_path(s.path) for s in snapshots if s.path not in roots]
    if (
        1 < len(given) == len(snapshots) == len({parts.texts for parts in given})
        and all(parts.find("rank") is not None for parts in given)  # without ranks, `_by_words` groups them
        and len({(os.path.basename(s.path), parts.fixed()) for s, parts in zip(snapshots, given, strict=True)}) == 1
    ):
        return [
            ReplicaGroup(
                title_of(snapshots[0].path),
                _find_step(given[0], []),
                number_replicas(snapshots),
                (Grouping.SAME_NAME(),),
            )
        ]
    folders = partition_by((s for s in snapshots if s.path in roots), lambda s: roots[s.path])
    inside = {frozenset(os.path.relpath(s.path, f) for s in found) for f, found in folders.items()}
    if len(folders) < 2 or len(inside) != 1 or len(snapshots) != sum(map(len, folders.values())):
        return []
    folder_parts = [split_path(folder) for folder in folders]
    if len({parts.texts for parts in folder_parts}) == 1 and (
        _find_varying(folder_parts, "step") or _find_varying(folder_parts, "node")
    ):
        return []  # steps or machines of one run
    grouping = (Grouping.FOLDER_COPIES(),)
    relative = partition_by(snapshots, lambda s: os.path.relpath(s.path, roots[s.path]))
    return [
        ReplicaGroup(title_of(path), None, _number_folders(members, roots), grouping)
        for path, members in relative.items()
    ]


def _number_folders(members: Sequence[Snapshot], roots: Mapping[str, str]) -> Ranked:
    parts = [split_path(roots[s.path]) for s in members]
    ranks = [part.numbers[at] for part in parts if (at := part.find("rank")) is not None]
    return tuple(zip(ranks, members, strict=True)) if len(set(ranks)) == len(members) else tuple(enumerate(members))


def _group_by_names(snapshots: list[Snapshot]) -> list[ReplicaGroup]:
    split_paths = refine_paths(snapshots)
    templates = list(partition_by(snapshots, lambda s: split_paths[s.path].texts).values())
    ranks = [_find_rank([split_paths[s.path] for s in members]) for members in templates]
    has_mesh = any("mesh" in parts.roles for parts in split_paths.values())
    if all(at is None for at in ranks) and not has_mesh and (found := _group_by_words(snapshots, split_paths)):
        return found
    groups: list[ReplicaGroup] = []
    for members, at in zip(templates, ranks, strict=True):
        groups += _group_by_template(members, split_paths, at)
    return groups


def _group_by_words(snapshots: list[Snapshot], split_paths: Mapping[str, PathNumbers]) -> list[ReplicaGroup]:
    """Group files whose names contain no rank and differ in words: a/checkpoint-5 and b/checkpoint-5 are replicas.

    Returns no group if some names differ in numbers only, or if the files are of different steps.
    """
    by_folder = partition_by(snapshots, lambda s: os.path.dirname(s.path))
    names = {frozenset(os.path.basename(s.path) for s in found) for found in by_folder.values()}
    # Folders with equal names, as in a/final, a/best, b/final, b/best: files with the same name are replicas.
    same = len(by_folder) > 1 == len(names) and len(next(iter(names))) > 1

    def moment_and_part(snapshot: Snapshot) -> tuple[object, ...]:
        fixed = split_paths[snapshot.path].fixed()
        return (*fixed, os.path.basename(snapshot.path)) if fixed or same else ()

    found = partition_by(snapshots, moment_and_part)
    if all(1 < len(members) == len({split_paths[s.path].texts for s in members}) for members in found.values()):
        return [_make_rankless_group(members, split_paths) for members in found.values()]
    # A file with a step in its name among files without steps, as in best.pth and step_5.pth.
    fixed = {split_paths[s.path].fixed() for s in snapshots} - {()}
    words = len(snapshots) == len({parts.texts for parts in split_paths.values()}) > 1
    one_step = len(fixed) == 1 and [role for role, _ in next(iter(fixed))] == ["step"]
    return [_make_rankless_group(snapshots, split_paths)] if words and one_step else []


def _make_rankless_group(members: list[Snapshot], split_paths: Mapping[str, PathNumbers]) -> ReplicaGroup:
    parts = [split_paths[s.path] for s in members]
    alike = bool(parts[0].fixed()) and len({part.fixed() for part in parts}) == 1
    at = parts[0].find("step") if alike else None
    grouping = (Grouping.NO_RANKS_ONE_STEP() if alike else Grouping.NO_RANKS(),)
    return ReplicaGroup("files", None if at is None else parts[0].numbers[at], tuple(enumerate(members)), grouping)


def _find_rank(parts: Sequence[PathNumbers]) -> int | None:
    """Return the position of the rank among the numbers of paths with equal texts.

    In order of preference: a rank in the file's own name, a varying rank in a folder's name, the last varying
    unnamed number, a varying number of the machine, and a constant rank in a folder's name.
    """
    folder_parts = parts[0].all_of("rank")
    own = [i for i in folder_parts if not parts[0].folders[i]]
    nodes, plain = _find_varying(parts, "node"), _find_varying(parts, "plain")
    if nodes and plain:  # the unnamed number must count each machine's files from 0; otherwise it may be a step
        counted = partition_by(parts, lambda p: tuple(p.numbers[i] for i in p.all_of("node"))).values()
        if any({p.numbers[plain[-1]] for p in of_node} != set(range(len(of_node))) for of_node in counted):
            plain = []
    for found in (own, _find_varying(parts, "rank"), plain, nodes, folder_parts):
        if found:
            return found[-1]
    return None


def _find_varying(parts: Sequence[PathNumbers], role: Role) -> list[int]:
    """Return the positions of this role at which the numbers differ between paths with equal texts."""
    return [i for i in parts[0].all_of(role) if len({p.numbers[i] for p in parts}) > 1]


def _group_by_template(
    members: list[Snapshot], split_paths: Mapping[str, PathNumbers], at: int | None
) -> list[ReplicaGroup]:
    """Group files whose paths differ only in numbers. at: the position of the rank, or None.

    Numbers of machine and mesh do not separate groups. Further numbers do not either, if ranks are unique without them;
    then they are the machines. Otherwise, a single further number is the step of a run.
    """
    parts = [split_paths[s.path] for s in members]
    opened = [i for i, role in enumerate(parts[0].roles) if role in ("local", "node", "mesh")]
    if at is None and "mesh" not in parts[0].roles:
        grouping = (_explain_single_files(parts),)
        return [
            ReplicaGroup(_name_run(split_paths[s.path], []), _find_step(split_paths[s.path], []), ((0, s),), grouping)
            for s in members
        ]
    if at is not None:
        # In rank_0/model_rank_0.pth, the second number repeats the rank.
        opened += [
            i for i in _find_varying(parts, "rank") if all(part.numbers[i] == part.numbers[at] for part in parts)
        ]
        opened = sorted({*opened, at})
    further = [i for i in _find_varying(parts, "plain") if i not in opened]
    known = at is None or parts[0].roles[at] != "plain"
    grouping = (Grouping.RANKS_IN_NAMES() if known else Grouping.ONLY_NUMBER(),)

    def member_key(snapshot: Snapshot) -> tuple[int, ...]:
        return tuple(split_paths[snapshot.path].numbers[i] for i in opened)

    for count in range(min(len(further), 3), 0, -1):
        for nodes in combinations(further, count):
            joined = partition_by(members, lambda s: split_paths[s.path].without(*opened, *nodes)).values()  # noqa: B023
            if all(_all_differ(map(member_key, same)) for same in joined):
                rest = [i for i in further if i not in nodes]
                by_node = (*grouping, Grouping.OTHER_NUMBER_IS_NODE())
                return [_make_group(same, split_paths, at, [*opened, *nodes], rest, by_node) for same in joined]
    groups = partition_by(members, lambda s: split_paths[s.path].without(*opened)).values()
    return [_make_group(same, split_paths, at, opened, further, grouping) for same in groups]


def _explain_single_files(parts: Sequence[PathNumbers]) -> Message:
    """Return why files that differ only in numbers, without a rank, are no replicas."""
    if _find_varying(parts, "shard"):
        return Grouping.SHARDS_ALONE()
    if _find_varying(parts, "part"):
        return Grouping.PARTS_ALONE()
    return Grouping.STEPS_ALONE() if len(parts) > 1 else Grouping.NAME_ALONE()


def _all_differ(items: Iterable[Hashable]) -> bool:
    listed = list(items)
    return len(set(listed)) == len(listed)


def _make_group(
    members: list[Snapshot],
    split_paths: Mapping[str, PathNumbers],
    at: int | None,
    opened: list[int],
    further: list[int],
    grouping: tuple[Message, ...],
) -> ReplicaGroup:
    """Return one group. opened: positions of the numbers that distinguish its members. further: for the step."""
    first = split_paths[members[0].path]
    ranked = [(-1 if at is None else split_paths[s.path].numbers[at], s) for s in members]
    if not _all_differ(rank for rank, _ in ranked):
        # Ranks within each machine or coordinates in a mesh: number the members in the order of their names.
        ranked = list(enumerate(members))
        if _all_differ(tuple(split_paths[s.path].numbers[i] for i in opened) for s in members):
            counted = Grouping.COUNTED_OVER_MESH() if first.mesh() else Grouping.COUNTED_OVER_NODES()
            grouping = (*grouping, counted)
        else:
            grouping = (Grouping.NUMBERED_BY_ORDER(),)
    ranked_members = [(rank, replace(s, mesh=split_paths[s.path].mesh() or s.mesh)) for rank, s in ranked]
    ranked_members.sort(key=lambda pair: pair[0])
    return ReplicaGroup(_name_run(first, opened, further), _find_step(first, further), tuple(ranked_members), grouping)


def _find_step(parts: PathNumbers, further: list[int]) -> int | None:
    at = parts.find("step")
    if at is None:
        at = _find_plain_step(parts, further)
    return None if at is None else parts.numbers[at]


def _find_plain_step(parts: PathNumbers, further: Sequence[int]) -> int | None:
    """Return the position of a single further number that is a path segment: 500/rank0, but not seed3/rank0."""
    return further[0] if len(further) == 1 and not parts.is_glued(further[0]) else None


def _name_run(parts: PathNumbers, opened: Sequence[int], further: Sequence[int] = ()) -> str:
    steps = parts.all_of("step")
    if not steps and (at := _find_plain_step(parts, further)) is not None:
        steps = [at]
    return title_of(parts.without(*steps, *opened))


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
