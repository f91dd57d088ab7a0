"""Which files are replicas of one another?

In this order: the metadata blocks; folders that are copies of each other; ranks in known names; the only number that
varies among otherwise equal names; else all files given are one group. What was decided is kept as a note, and printed.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.layout.groups import Ranked, Replicas, classes, distinct, numbered, title_of
from syncheck.layout.metadata import by_metadata, with_named
from syncheck.layout.names import PathNumbers, take_apart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.names import Role
    from syncheck.snapshots import Snapshot


def group(
    snapshots: Sequence[Snapshot],
    group_by: str | None = None,
    roots: Mapping[str, str] | None = None,
    alike: Mapping[str, str] | None = None,
) -> tuple[Replicas, ...]:
    """Sort snapshots into groups of replicas, ordered by run and step.

    group_by: a regular expression searched in each path; files with equal captured groups (or equal whole matches,
    where it has none) are one group. roots: for files that were found in a folder given, that folder. alike: for paths
    that were written in different ways, how to write them so that those of one folder begin alike.
    Every snapshot ends in exactly one group. Raises re.error for a bad expression.
    """
    if group_by is None and alike is not None and any(path != alike[path] for path in alike):
        # Sorted by the paths written alike, and shown as the user wrote them.
        given = {alike[s.path]: s for s in snapshots}
        folders = {alike[path]: alike[folder] for path, folder in (roots or {}).items() if path in alike}
        found = group([replace(s, path=path) for path, s in given.items()], None, folders)
        return tuple(replace(g, ranks=tuple((rank, given[s.path]) for rank, s in g.ranks)) for g in found)
    ordered = sorted(snapshots, key=lambda s: _natural(s.path))
    if group_by is not None:
        groups = _by_expression(ordered, re.compile(group_by))
    else:
        described = [s for s in ordered if s.metadata is not None and s.metadata.rank is not None]
        plain = [s for s in ordered if s.metadata is None or s.metadata.rank is None]
        groups, plain = with_named(by_metadata(described), plain)
        groups += _copies(plain, roots or {}) or _by_names(plain)
    return tuple(sorted(distinct(groups), key=lambda r: (r.run, r.step if r.step is not None else -1)))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Sort key that puts rank_10 after rank_9."""
    parts = re.split(r"(\d+)", text)
    return [(0, int(part), "") if i % 2 else (1, 0, part) for i, part in enumerate(parts)]


def _by_expression(snapshots: Iterable[Snapshot], pattern: re.Pattern[str]) -> list[Replicas]:
    def key(snapshot: Snapshot) -> tuple[str, ...]:
        match = pattern.search(snapshot.path)
        return (match.groups("") or (match.group(),)) if match else ("no match", snapshot.path)

    note = f"grouped by the expression {pattern.pattern!r}"
    return [Replicas("-".join(k), None, numbered(members), note) for k, members in classes(snapshots, key).items()]


def _copies(snapshots: list[Snapshot], roots: Mapping[str, str]) -> list[Replicas]:
    """Several folders that hold the same relative paths are copies, compared path by path.

    So are files of one name that were given one by one, where words in their folders' names tell them apart.
    """
    given = [take_apart(s.path) for s in snapshots if s.path not in roots]
    if (
        1 < len(given) == len(snapshots) == len({parts.texts for parts in given})
        and all(parts.find("rank") is not None for parts in given)  # without ranks it is a matter of words
        and len({(os.path.basename(s.path), parts.fixed()) for s, parts in zip(snapshots, given, strict=True)}) == 1
    ):
        note = "files of one name in several folders"
        return [Replicas(title_of(snapshots[0].path), _step(given[0], []), numbered(snapshots), note)]
    folders = classes((s for s in snapshots if s.path in roots), lambda s: roots[s.path])
    inside = {frozenset(os.path.relpath(s.path, f) for s in found) for f, found in folders.items()}
    if len(folders) < 2 or len(inside) != 1 or len(snapshots) != sum(map(len, folders.values())):
        return []
    named = [take_apart(folder) for folder in folders]
    if len({parts.texts for parts in named}) == 1 and _varying(named, "step"):
        return []  # moments of one run
    note = "grouped by path: the folders are copies of each other"
    relative = classes(snapshots, lambda s: os.path.relpath(s.path, roots[s.path]))
    return [Replicas(title_of(path), None, _number_folders(members, roots), note) for path, members in relative.items()]


def _number_folders(members: Sequence[Snapshot], roots: Mapping[str, str]) -> Ranked:
    parts = [take_apart(roots[s.path]) for s in members]
    ranks = [part.numbers[at] for part in parts if (at := part.find("rank")) is not None]
    return tuple(zip(ranks, members, strict=True)) if len(set(ranks)) == len(members) else tuple(enumerate(members))


def _by_names(snapshots: list[Snapshot]) -> list[Replicas]:
    apart = {s.path: take_apart(s.path) for s in snapshots}
    templates = list(classes(snapshots, lambda s: apart[s.path].texts).values())
    ranks = [_rank_position([apart[s.path] for s in members]) for members in templates]
    if all(at is None for at in ranks) and (found := _by_words(snapshots, apart)):
        return found
    groups: list[Replicas] = []
    for members, at in zip(templates, ranks, strict=True):
        if at is None and len(members) == 1 and not apart[members[0].path].fixed():
            groups.append(
                Replicas(title_of(members[0].path), None, ((0, members[0]),), "its name matches no other file's")
            )
        else:
            groups += _template_groups(members, apart, at)
    return groups


def _by_words(snapshots: list[Snapshot], apart: Mapping[str, PathNumbers]) -> list[Replicas]:
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


def _without_ranks(members: list[Snapshot], apart: Mapping[str, PathNumbers]) -> Replicas:
    parts = [apart[s.path] for s in members]
    alike = bool(parts[0].fixed()) and len({part.fixed() for part in parts}) == 1
    at = parts[0].find("step") if alike else None
    note = f"no rank in the names: all files {'of one step and part ' if alike else ''}given are one group"
    return Replicas("files", None if at is None else parts[0].numbers[at], tuple(enumerate(members)), note)


def _rank_position(parts: Sequence[PathNumbers]) -> int | None:
    """Which number of these otherwise equal paths is the rank?

    One named so in the file's own name is; one in a folder's name is if it varies; else the last unnamed number that
    varies; else one in a folder's name, though it does not vary.
    """
    named = [i for i, role in enumerate(parts[0].roles) if role == "rank"]
    own = [i for i in named if not parts[0].folders[i]]
    for found in (own, _varying(parts, "rank"), _varying(parts, "plain"), named):
        if found:
            return found[-1]
    return None


def _varying(parts: Sequence[PathNumbers], role: Role) -> list[int]:
    """Return which numbers of this role are not the same in all of these otherwise equal paths."""
    return [i for i, own in enumerate(parts[0].roles) if own == role and len({p.numbers[i] for p in parts}) > 1]


def _template_groups(members: list[Snapshot], apart: Mapping[str, PathNumbers], at: int | None) -> list[Replicas]:
    """Group files whose paths are equal but for numbers. at: the position of the rank, None where there is none.

    Groups that differ in one further number are steps of one run, unless their ranks do not repeat: then the number
    is a node's, and all are one group.
    """
    parts = [apart[s.path] for s in members]
    further = [i for i in _varying(parts, "plain") if i != at]
    if at is None:
        note = _why_alone(parts)
        return [Replicas(_run(apart[s.path], None), _step(apart[s.path], further), ((0, s),), note) for s in members]
    # rank_0/model_rank_0.pth and local_rank_0_global_rank_4.pth: numbers that say of the rank what is known.
    twice = [i for i in _varying(parts, "rank") if all(part.numbers[i] == part.numbers[at] for part in parts)]
    twice += _varying(parts, "local")
    known = parts[0].roles[at] == "rank"
    note = "ranks taken from the names" if known else "the only number that varies is taken for the rank"
    if len(further) == 1:
        joined = classes(members, lambda s: apart[s.path].without(at, further[0], *twice)).values()
        if all(_all_differ(apart[s.path].numbers[at] for s in same) for same in joined):
            return [_named(same, apart, at, [], f"{note}, the further number for the node") for same in joined]
    groups = classes(members, lambda s: apart[s.path].without(at, *twice)).values()
    return [_named(same, apart, at, further, note) for same in groups]


def _why_alone(parts: Sequence[PathNumbers]) -> str:
    """Say why files with equal names but for numbers are no replicas, though none of the numbers is a rank."""
    if _varying(parts, "shard"):
        return "only a model-parallel or ZeRO rank differs: each file holds another part of the model"
    if _varying(parts, "part"):
        return "only the part differs: each file holds another part of the checkpoint"
    return "only the step differs: moments of one replica" if len(parts) > 1 else "its name matches no other file's"


def _all_differ(numbers: Iterable[int]) -> bool:
    listed = list(numbers)
    return len(set(listed)) == len(listed)


def _named(
    members: list[Snapshot], apart: Mapping[str, PathNumbers], at: int, further: list[int], note: str
) -> Replicas:
    first = apart[members[0].path]
    ranked = sorted(((apart[s.path].numbers[at], s) for s in members), key=lambda pair: pair[0])
    if not _all_differ(rank for rank, _ in ranked):
        ranked, note = list(enumerate(members)), "numbered by their order, for the names give a rank to several files"
    return Replicas(_run(first, at, further), _step(first, further), tuple(ranked), note)


def _step(parts: PathNumbers, further: list[int]) -> int | None:
    at = parts.find("step")
    if at is None and len(further) == 1:
        at = further[0]
    return None if at is None else parts.numbers[at]


def _run(parts: PathNumbers, at: int | None, further: Sequence[int] = ()) -> str:
    steps = [i for i, role in enumerate(parts.roles) if role == "step"]
    if not steps and len(further) == 1:
        steps = list(further)
    return title_of(parts.without(*steps, *([] if at is None else [at])))
