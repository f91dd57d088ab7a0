"""A group of replicas, and its name."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from syncheck.layout.names import take_apart
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

    K = TypeVar("K")
    V = TypeVar("V")
    from syncheck.snapshots import Metadata

Ranked = tuple[tuple[int, "Snapshot"], ...]


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Snapshots that ought to be equal, in the order of their ranks.

    run: a name for the group. step: of the run, if known. ranks: each member's rank, or its position if its rank is
    unknown. grouping: how the group was found. label: the name without the folder or run_id that distinguishes `run`
    from other groups of this call, because these depend on the machine and the launch.
    """

    run: str
    step: int | None
    ranks: Ranked
    grouping: tuple[Message, ...]
    run_id: str | None = None
    label: str = ""


def classes(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Sort items into lists of equal key, keys in the order of their first item."""
    found: dict[K, list[V]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def numbered(members: Sequence[Snapshot]) -> Ranked:
    """Number replicas by their metadata or names where that gives each its own rank, else by position."""
    found = [rank_of(member) for member in members]
    ranks = [rank for rank in found if rank is not None]
    if len(set(ranks)) < len(members):
        return tuple(enumerate(members))
    return tuple(sorted(zip(ranks, members, strict=True), key=lambda pair: pair[0]))


def rank_of(snapshot: Snapshot) -> int | None:
    """Return the rank that a snapshot's metadata, or else its name, tells."""
    if snapshot.metadata is not None and snapshot.metadata.rank is not None:
        return snapshot.metadata.rank
    return rank_by_name(snapshot)


def rank_by_name(snapshot: Snapshot) -> int | None:
    """Return the rank that a snapshot's path has."""
    parts = take_apart(snapshot.path)
    at = parts.find("rank")
    return None if at is None else parts.numbers[at]


def template_of(snapshot: Snapshot) -> str:
    """Return the path with the numbers of the rank and the machine left open, the ending taken off.

    Without a rank in the name, the one number that is the metadata's rank is left open, else the whole name.
    """
    parts = take_apart(snapshot.path)
    opened = [i for i, role in enumerate(parts.roles) if role in ("rank", "local", "node", "mesh")]
    if snapshot.metadata is not None and "rank" not in parts.roles:
        found = [i for i in parts.all_of("plain") if parts.numbers[i] == snapshot.metadata.rank]
        if not found:
            return "/".join((*parts.without(*opened).split("/")[:-1], "*"))
        opened.append(found[-1])
    return parts.without(*opened)


_FILLER = re.compile(
    r"(?:(?:^|(?<=[-_.]))(?:rank|r|step|global_step|epoch|iter|checkpoint|node|host|node_rank|local_rank)[-_=]?\*|\*)"
)


def title_of(pattern: str) -> str:
    """Return the last part of a path that says more than rank and step: ckpts/ddp_rank* gives ddp."""
    for segment in reversed(pattern.split("/")):
        title = _FILLER.sub("", segment).strip("-_. /")
        if title:
            return title
    return "files"


def distinct(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Keep runs of one name apart: what has another run_id is another run, and so is a second group of one step.

    Such groups get the folder that holds all of their run in front of their name; runs of one folder, their run_id.
    """
    result = []
    for run, same in classes(groups, lambda g: g.run).items():
        launches = classes(same, lambda g: g.run_id)
        repeated = len({g.step for g in same}) < len(same)
        folders = {
            run_id: _common_folder(s.path for g in found for _, s in g.ranks) for run_id, found in launches.items()
        }
        names, places = [], []
        for g in same:
            unnamed = g.run_id is None and repeated  # then nothing but its own folder tells it from the others
            folder = os.path.dirname(g.ranks[0][1].path) if unnamed else folders[g.run_id]
            by_folder = unnamed or len(launches) > 1
            name = f"{folder}/{run}" if by_folder and folder else run
            if g.run_id is not None and list(folders.values()).count(folder) > 1:
                name = f"{name} ({g.run_id[:8]})"
            names.append(name)
            places.append(_place(folder) if by_folder else ())
        result += [
            replace(g, run=name, label="/".join((*place, run)))
            for g, name, place in zip(same, names, _telling_apart(places), strict=True)
        ]
    return result


def _place(folder: str) -> tuple[str, ...]:
    """Return the parts of a folder's path, ranks and steps left open: they come and go with the files given."""
    parts = take_apart(folder)
    moments = [i for i, role in enumerate(parts.roles) if role in ("rank", "local", "step")]
    return tuple(part for part in parts.without(*moments).split("/") if part not in ("", "."))


def _telling_apart(places: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the places without the parts at their beginning and end that all of them have."""
    for _ in range(2):  # at the beginning; then, with all of them turned round, at the end
        differing = (i for i, parts in enumerate(zip(*places, strict=False)) if len(set(parts)) > 1)
        common = next(differing, min(map(len, places)))
        places = [place[common:][::-1] for place in places]
    return places


def _common_folder(paths: Iterable[str]) -> str:
    folders = [os.path.dirname(path) for path in paths]
    try:
        return os.path.commonpath(folders)
    except ValueError:  # absolute and relative paths in one call
        return folders[0]


def last_steps(groups: Sequence[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
    """Return, of each run with two replicas or more, the group of its last step; of two of one step the first."""
    several = [group for group in reversed(groups) if len(group.ranks) > 1]
    several.sort(key=lambda group: -1 if group.step is None else group.step)
    return tuple({group.run: group for group in several}.values())


def by_step(groups: Iterable[ReplicaGroup]) -> dict[str, dict[int, ReplicaGroup]]:
    """Sort the groups that name their step by run and step; of two of one step, the first stands."""
    runs: dict[str, dict[int, ReplicaGroup]] = defaultdict(dict)
    for group in groups:
        if group.step is not None:
            runs[group.run].setdefault(group.step, group)
    return {run: dict(sorted(steps.items())) for run, steps in runs.items()}


def group_by_metadata(snapshots: Iterable[Snapshot]) -> list[ReplicaGroup]:
    """Group by run and run_id, then by folder and name pattern.

    A step inside a file does not split files that share a folder and a pattern: a stale replica is found that way.
    """
    groups: list[ReplicaGroup] = []
    for (run, run_id), members in classes(snapshots, lambda s: (_meta(s).run, _meta(s).run_id)).items():
        for pattern, same in classes(members, template_of).items():
            for part in _split_repeated(same):
                steps = [step for step in (_meta(s).step for s in part) if step is not None]
                step = max(steps, default=None)
                groups.append(
                    ReplicaGroup(run or title_of(pattern), step, numbered(part), (Grouping.METADATA(),), run_id)
                )
    return groups


def _meta(snapshot: Snapshot) -> Metadata:
    assert snapshot.metadata is not None
    return snapshot.metadata


def _split_repeated(same: list[Snapshot]) -> list[list[Snapshot]]:
    """Split the files of one pattern by step if a rank appears twice, else leave them together."""
    if len({_meta(s).rank for s in same}) == len(same):
        return [same]
    return list(classes(same, lambda s: _meta(s).step).values())
