"""Which files are replicas of one another?

In this order: the metadata blocks; folders that are copies of each other; ranks in known names; the only number that
varies among otherwise equal names; else all files given are one group. What was decided is kept as a note, and printed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from syncheck.layout.groups import Ranked, ReplicaGroup, classes, distinct, group_by_metadata, numbered, title_of
from syncheck.layout.joining import join_hosts
from syncheck.layout.names import PathNumbers, take_apart
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from syncheck.layout.names import Role
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot


def group(
    snapshots: Sequence[Snapshot],
    group_by: str | None = None,
    roots: Mapping[str, str] | None = None,
    alike: Mapping[str, str] | None = None,
) -> tuple[ReplicaGroup, ...]:
    """Sort snapshots into groups of replicas, ordered by run and step.

    group_by: a regular expression searched in each path; files with equal captured groups (or equal whole matches,
    where it has none) are one group. roots: for files that were found in a folder given, that folder. alike: for paths
    that were written in different ways, how to write them so that those of one folder begin alike.
    Every snapshot ends in exactly one group. Raises re.error for a bad expression.
    """
    if group_by is None and alike is not None and any(path != alike[path] for path in alike):
        # Sorted by the paths written alike, and shown as the user wrote them.
        given = {alike[s.path]: s.path for s in snapshots}
        folders = {alike[path]: alike[folder] for path, folder in (roots or {}).items() if path in alike}
        found = group([replace(s, path=alike[s.path]) for s in snapshots], None, folders)
        return tuple(
            replace(g, ranks=tuple((rank, replace(s, path=given[s.path])) for rank, s in g.ranks)) for g in found
        )
    ordered = [replace(s, host=take_apart(s.path).host) for s in sorted(snapshots, key=lambda s: _natural(s.path))]
    if group_by is not None:
        groups = _by_expression(ordered, re.compile(group_by))
    else:
        described = [s for s in ordered if s.metadata is not None and s.metadata.rank is not None]
        plain = [s for s in ordered if s.metadata is None or s.metadata.rank is None]
        copies = _copies(plain, roots or {})
        groups = join_hosts(group_by_metadata(described) + ([] if copies else _by_names(plain))) + copies
    return tuple(sorted(distinct(groups), key=lambda r: (r.run, r.step if r.step is not None else -1)))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key that puts rank_10 after rank_9."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if i % 2 else (1, 0, part) for i, part in enumerate(parts)]


def _by_expression(snapshots: Iterable[Snapshot], pattern: re.Pattern[str]) -> list[ReplicaGroup]:
    def key(snapshot: Snapshot) -> tuple[str, ...]:
        match = pattern.search(snapshot.path)
        return (match.groups("") or (match.group(),)) if match else ("no match", snapshot.path)

    grouping = (Grouping.EXPRESSION(pattern=pattern.pattern),)
    return [
        ReplicaGroup("-".join(k), None, numbered(members), grouping) for k, members in classes(snapshots, key).items()
    ]


def _copies(snapshots: list[Snapshot], roots: Mapping[str, str]) -> list[ReplicaGroup]:
    """Several folders that hold the same relative paths are copies, compared path by path.

    So are files of one name that were given one by one, where words in their folders' names tell them apart.
    """
    given = [take_apart(s.path) for s in snapshots if s.path not in roots]
    if (
        1 < len(given) == len(snapshots) == len({parts.texts for parts in given})
        and all(parts.find("rank") is not None for parts in given)  # without ranks it is a matter of words
        and len({(os.path.basename(s.path), parts.fixed()) for s, parts in zip(snapshots, given, strict=True)}) == 1
    ):
        return [
            ReplicaGroup(title_of(snapshots[0].path), _step(given[0], []), numbered(snapshots), (Grouping.SAME_NAME(),))
        ]
    folders = classes((s for s in snapshots if s.path in roots), lambda s: roots[s.path])
    inside = {frozenset(os.path.relpath(s.path, f) for s in found) for f, found in folders.items()}
    if len(folders) < 2 or len(inside) != 1 or len(snapshots) != sum(map(len, folders.values())):
        return []
    named = [take_apart(folder) for folder in folders]
    if len({parts.texts for parts in named}) == 1 and (_varying(named, "step") or _varying(named, "node")):
        return []  # moments of one run, or its machines
    grouping = (Grouping.FOLDER_COPIES(),)
    relative = classes(snapshots, lambda s: os.path.relpath(s.path, roots[s.path]))
    return [
        ReplicaGroup(title_of(path), None, _number_folders(members, roots), grouping)
        for path, members in relative.items()
    ]


def _number_folders(members: Sequence[Snapshot], roots: Mapping[str, str]) -> Ranked:
    parts = [take_apart(roots[s.path]) for s in members]
    ranks = [part.numbers[at] for part in parts if (at := part.find("rank")) is not None]
    return tuple(zip(ranks, members, strict=True)) if len(set(ranks)) == len(members) else tuple(enumerate(members))


def _by_names(snapshots: list[Snapshot]) -> list[ReplicaGroup]:
    apart = {s.path: take_apart(s.path) for s in snapshots}
    templates = list(classes(snapshots, lambda s: apart[s.path].texts).values())
    ranks = [_rank_position([apart[s.path] for s in members]) for members in templates]
    has_mesh = any("mesh" in parts.roles for parts in apart.values())
    if all(at is None for at in ranks) and not has_mesh and (found := _by_words(snapshots, apart)):
        return found
    groups: list[ReplicaGroup] = []
    for members, at in zip(templates, ranks, strict=True):
        groups += _template_groups(members, apart, at)
    return groups


def _by_words(snapshots: list[Snapshot], apart: Mapping[str, PathNumbers]) -> list[ReplicaGroup]:
    """Group files whose names tell no rank and differ in words: a/checkpoint-5 and b/checkpoint-5 are replicas.

    Returns no group where words alone do not tell the files apart, or where they are of different steps.
    """
    held = classes(snapshots, lambda s: os.path.dirname(s.path))
    names = {frozenset(os.path.basename(s.path) for s in found) for found in held.values()}
    # Folders with the same names in each, as a/final, a/best, b/final, b/best: what bears one name is one thing.
    same = len(held) > 1 == len(names) and len(next(iter(names))) > 1

    def moment_and_part(snapshot: Snapshot) -> tuple[object, ...]:
        fixed = apart[snapshot.path].fixed()
        return (*fixed, os.path.basename(snapshot.path)) if fixed or same else ()

    found = classes(snapshots, moment_and_part)
    if all(1 < len(members) == len({apart[s.path].texts for s in members}) for members in found.values()):
        return [_without_ranks(members, apart) for members in found.values()]
    # One with a step in its name and others without: best.pth and step_5.pth.
    fixed = {apart[s.path].fixed() for s in snapshots} - {()}
    words = len(snapshots) == len({parts.texts for parts in apart.values()}) > 1
    one_step = len(fixed) == 1 and [role for role, _ in next(iter(fixed))] == ["step"]
    return [_without_ranks(snapshots, apart)] if words and one_step else []


def _without_ranks(members: list[Snapshot], apart: Mapping[str, PathNumbers]) -> ReplicaGroup:
    parts = [apart[s.path] for s in members]
    alike = bool(parts[0].fixed()) and len({part.fixed() for part in parts}) == 1
    at = parts[0].find("step") if alike else None
    grouping = (Grouping.NO_RANKS_ONE_STEP() if alike else Grouping.NO_RANKS(),)
    return ReplicaGroup("files", None if at is None else parts[0].numbers[at], tuple(enumerate(members)), grouping)


def _rank_position(parts: Sequence[PathNumbers]) -> int | None:
    """Which number of these otherwise equal paths is the rank?

    One named so in the file's own name is; one in a folder's name is if it varies; else the number of the machine, or
    the last unnamed number that varies; else one in a folder's name, though it does not vary.
    """
    named = parts[0].all_of("rank")
    own = [i for i in named if not parts[0].folders[i]]
    nodes, plain = _varying(parts, "node"), _varying(parts, "plain")
    if nodes and plain:  # the files of a machine are counted from 0, or have a step
        counted = classes(parts, lambda p: p.node()).values()
        if any({p.numbers[plain[-1]] for p in of_node} != set(range(len(of_node))) for of_node in counted):
            plain = []
    for found in (own, _varying(parts, "rank"), plain, nodes, named):
        if found:
            return found[-1]
    return None


def _varying(parts: Sequence[PathNumbers], role: Role) -> list[int]:
    """Return which numbers of this role are not the same in all of these otherwise equal paths."""
    return [i for i in parts[0].all_of(role) if len({p.numbers[i] for p in parts}) > 1]


def _template_groups(members: list[Snapshot], apart: Mapping[str, PathNumbers], at: int | None) -> list[ReplicaGroup]:
    """Group files whose paths are equal but for numbers. at: the position of the rank, None if there is none.

    Numbers of the machine and the mesh keep no files apart. Nor do further numbers if no rank is given twice
    without them: they are taken for machines. Groups that differ in one further number are steps of one run.
    """
    parts = [apart[s.path] for s in members]
    opened = [i for i, role in enumerate(parts[0].roles) if role in ("local", "node", "mesh")]
    if at is None and "mesh" not in parts[0].roles:
        grouping = (_why_alone(parts),)
        return [ReplicaGroup(_run(apart[s.path], []), _step(apart[s.path], []), ((0, s),), grouping) for s in members]
    if at is not None:
        # rank_0/model_rank_0.pth: a number that repeats the rank says nothing more.
        opened += [i for i in _varying(parts, "rank") if all(part.numbers[i] == part.numbers[at] for part in parts)]
        opened = sorted({*opened, at})
    further = [i for i in _varying(parts, "plain") if i not in opened]
    known = at is None or parts[0].roles[at] != "plain"
    grouping = (Grouping.RANKS_IN_NAMES() if known else Grouping.ONLY_NUMBER(),)

    def who(snapshot: Snapshot) -> tuple[int, ...]:
        return tuple(apart[snapshot.path].numbers[i] for i in opened)

    for count in range(min(len(further), 3), 0, -1):
        for nodes in combinations(further, count):
            joined = classes(members, lambda s: apart[s.path].without(*opened, *nodes)).values()  # noqa: B023
            if all(_all_differ(map(who, same)) for same in joined):
                rest = [i for i in further if i not in nodes]
                by_node = (*grouping, Grouping.OTHER_NUMBER_IS_NODE())
                return [_named(same, apart, at, [*opened, *nodes], rest, by_node) for same in joined]
    groups = classes(members, lambda s: apart[s.path].without(*opened)).values()
    return [_named(same, apart, at, opened, further, grouping) for same in groups]


def _why_alone(parts: Sequence[PathNumbers]) -> Message:
    """Return why files with equal names but for numbers are no replicas, though none of the numbers is a rank."""
    if _varying(parts, "shard"):
        return Grouping.SHARDS_ALONE()
    if _varying(parts, "part"):
        return Grouping.PARTS_ALONE()
    return Grouping.STEPS_ALONE() if len(parts) > 1 else Grouping.NAME_ALONE()


def _all_differ(items: Iterable[Hashable]) -> bool:
    listed = list(items)
    return len(set(listed)) == len(listed)


def _named(
    members: list[Snapshot],
    apart: Mapping[str, PathNumbers],
    at: int | None,
    opened: list[int],
    further: list[int],
    grouping: tuple[Message, ...],
) -> ReplicaGroup:
    """Return one group. opened: positions of the numbers that tell its members apart; further: of those of a run."""
    first = apart[members[0].path]
    ranked = [(-1 if at is None else apart[s.path].numbers[at], s) for s in members]
    if not _all_differ(rank for rank, _ in ranked):
        # Ranks within each machine, or coordinates in a mesh: counted in the order of the names.
        ranked = list(enumerate(members))
        if _all_differ(tuple(apart[s.path].numbers[i] for i in opened) for s in members):
            counted = Grouping.COUNTED_OVER_MESH() if first.mesh() else Grouping.COUNTED_OVER_NODES()
            grouping = (*grouping, counted)
        else:
            grouping = (Grouping.NUMBERED_BY_ORDER(),)
    placed = [(rank, replace(s, mesh=apart[s.path].mesh() or s.mesh)) for rank, s in ranked]
    placed.sort(key=lambda pair: pair[0])
    return ReplicaGroup(_run(first, opened, further), _step(first, further), tuple(placed), grouping)


def _step(parts: PathNumbers, further: list[int]) -> int | None:
    at = parts.find("step")
    if at is None:
        at = _plain_step(parts, further)
    return None if at is None else parts.numbers[at]


def _plain_step(parts: PathNumbers, further: Sequence[int]) -> int | None:
    """Return the position of the one further number, if it is no part of a word: of 500/rank0, not of seed3/rank0."""
    return further[0] if len(further) == 1 and not parts.is_glued(further[0]) else None


def _run(parts: PathNumbers, opened: Sequence[int], further: Sequence[int] = ()) -> str:
    steps = parts.all_of("step")
    if not steps and (at := _plain_step(parts, further)) is not None:
        steps = [at]
    return title_of(parts.without(*steps, *opened))
