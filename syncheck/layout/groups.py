"""Groups of replicas and their names."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from syncheck.layout.path_numbers import split_path
from syncheck.messages import Grouping
from syncheck.text import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.layout.path_numbers import PathNumbers
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

    K = TypeVar("K")
    V = TypeVar("V")
    from syncheck.snapshots import Metadata

Ranked = tuple[tuple[int, "Snapshot"], ...]


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Snapshots of replicas, in the order of their ranks.

    run: a name for the group. step: of the run, if known. ranks: each member's rank, or its position if its rank is
    unknown. grouping: how the group was found. label: the name without the folder or run_id that distinguishes `run`
    from other groups of this call, because these depend on the machine and the launch. paired: the ranks of a running
    job, which pair parameters and buffers by position.
    """

    run: str
    step: int | None
    ranks: Ranked
    grouping: tuple[Message, ...]
    run_id: str | None = None
    label: str = ""
    paired: bool = False

    @property
    def two_models(self) -> bool:
        """Whether its members are two models, not replicas. Their values are compared as in files, also in memory."""
        return any(isinstance(rank, Side) for rank, _ in self.ranks)


def partition_by(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Partition items by key, in the order of each key's first item."""
    found: dict[K, list[V]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def number_replicas(members: Sequence[Snapshot]) -> Ranked:
    """Number replicas by the ranks in their metadata or names if all ranks are unique, else by position."""
    found = [rank_of(member) for member in members]
    ranks = [rank for rank in found if rank is not None]
    if len(set(ranks)) < len(members):
        return tuple(enumerate(members))
    return tuple(sorted(zip(ranks, members, strict=True), key=lambda pair: pair[0]))


def rank_of(snapshot: Snapshot) -> int | None:
    """Return the rank in a snapshot's metadata, or else in its name."""
    if snapshot.metadata is not None and snapshot.metadata.rank is not None:
        return snapshot.metadata.rank
    return rank_in_path(snapshot)


def rank_in_path(snapshot: Snapshot) -> int | None:
    """Return the rank in a snapshot's path."""
    parts = split_path(snapshot.path)
    at = parts.find("rank")
    return None if at is None else parts.numbers[at]


def template_of(snapshot: Snapshot, shared: AbstractSet[str] = frozenset()) -> str:
    """Return the path without extension, with `*` for the numbers of rank and machine.

    Without a rank in the name, `*` replaces the number that equals the metadata's rank, or else the whole file name.
    shared: starts of paths whose next number is no rank, by `_find_shared_numbers`.
    """
    parts = split_path(snapshot.path)
    opened = [i for i, role in enumerate(parts.roles) if role in ("rank", "local", "node", "mesh")]
    if snapshot.metadata is not None and "rank" not in parts.roles:
        ranks = [position for position in _find_rank_numbers(snapshot) if _start_of(parts, position) not in shared]
        if not ranks:
            return "/".join((*parts.without(*opened).split("/")[:-1], "*"))
        opened.append(ranks[-1])
    return parts.without(*opened)


def _find_rank_numbers(snapshot: Snapshot) -> list[int]:
    """Return the positions of the unnamed numbers in a path that equal the rank in the metadata."""
    parts = split_path(snapshot.path)
    rank = _metadata_of(snapshot).rank
    return [position for position in parts.all_of("plain") if parts.numbers[position] == rank]


def _find_shared_numbers(members: Sequence[Snapshot]) -> set[str]:
    """Return the starts of paths whose next number names a folder of several ranks, like `exp` of exp0/.

    A number in a folder's name is the rank only if it is the rank of each file below such folders.
    """
    shared: set[str] = set()
    for snapshot in members:
        parts = split_path(snapshot.path)
        ranks = _find_rank_numbers(snapshot)
        for position in parts.all_of("plain"):
            if parts.folders[position] and position not in ranks:
                shared.add(_start_of(parts, position))

    return shared


def _start_of(parts: PathNumbers, position: int) -> str:
    """Return the path before a number, with `*` for earlier numbers."""
    return "*".join(parts.texts[: position + 1])


_FILLER = re.compile(
    r"(?:(?:^|(?<=[-_.]))(?:rank|r|step|global_step|epoch|iter|checkpoint|node|host|node_rank|local_rank)[-_=]?\*|\*)"
)


def title_of(pattern: str) -> str:
    """Return the last path segment with more than rank and step: ckpts/ddp_rank* gives ddp."""
    for segment in reversed(pattern.split("/")):
        title = _FILLER.sub("", segment).strip("-_. /")
        if title:
            return title
    return "files"


def make_names_unique(groups: list[ReplicaGroup]) -> list[ReplicaGroup]:
    """Make the names of runs unique: groups differ if their run_id differs, or if a step repeats within a run.

    Such a group is named after its run's common folder; runs in one folder also get their run_id.
    """
    result = []
    for run, same in partition_by(groups, lambda g: g.run).items():
        launches = partition_by(same, lambda g: g.run_id)
        repeated = len({g.step for g in same}) < len(same)
        folders = {
            run_id: _common_folder(s.path for g in found for _, s in g.ranks) for run_id, found in launches.items()
        }
        names, segments = [], []
        for g in same:
            unnamed = g.run_id is None and repeated  # only its own folder distinguishes this group
            folder = os.path.dirname(g.ranks[0][1].path) if unnamed else folders[g.run_id]
            by_folder = unnamed or len(launches) > 1
            name = f"{folder}/{run}" if by_folder and folder else run
            if g.run_id is not None and list(folders.values()).count(folder) > 1:
                name = f"{name} ({g.run_id[:8]})"
            names.append(name)
            segments.append(_path_segments(folder) if by_folder else ())
        result += [
            replace(g, run=name, label="/".join((*segment, run)))
            for g, name, segment in zip(same, names, _strip_common(segments), strict=True)
        ]
    return result


def _path_segments(folder: str) -> tuple[str, ...]:
    """Return the segments of a folder's path without ranks and steps, which vary with the given files."""
    parts = split_path(folder)
    moments = [i for i, role in enumerate(parts.roles) if role in ("rank", "local", "step")]
    return tuple(part for part in parts.without(*moments).split("/") if part not in ("", "."))


def _strip_common(segments: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Remove the common segments at the start and end of all paths."""
    for _ in range(2):  # at the start, and after reversing, at the end
        differing = (i for i, parts in enumerate(zip(*segments, strict=False)) if len(set(parts)) > 1)
        common = next(differing, min(map(len, segments)))
        segments = [segment[common:][::-1] for segment in segments]
    return segments


def _common_folder(paths: Iterable[str]) -> str:
    folders = [os.path.dirname(path) for path in paths]
    try:
        return os.path.commonpath(folders)
    except ValueError:  # absolute and relative paths in one call
        return folders[0]


def select_last_steps(groups: Sequence[ReplicaGroup]) -> tuple[ReplicaGroup, ...]:
    """Return the last step's group of each run with several replicas; for repeated steps, the first group."""
    several = [group for group in reversed(groups) if len(group.ranks) > 1]
    several.sort(key=lambda group: -1 if group.step is None else group.step)
    return tuple({group.run: group for group in several}.values())


def group_by_step(groups: Iterable[ReplicaGroup]) -> dict[str, dict[int, ReplicaGroup]]:
    """Map run and step to groups with a known step; for repeated steps, the first group."""
    runs: dict[str, dict[int, ReplicaGroup]] = defaultdict(dict)
    for group in groups:
        if group.step is not None:
            runs[group.run].setdefault(group.step, group)
    return {run: dict(sorted(steps.items())) for run, steps in runs.items()}


def group_by_metadata(snapshots: Iterable[Snapshot]) -> list[ReplicaGroup]:
    """Group by run and run_id, then by folder and name pattern.

    Different steps do not split files of one folder and pattern, so that stale replicas are found.
    """
    groups: list[ReplicaGroup] = []
    for (run, run_id), members in partition_by(
        snapshots, lambda s: (_metadata_of(s).run, _metadata_of(s).run_id)
    ).items():
        shared = _find_shared_numbers(members)
        for pattern, same in partition_by(members, partial(template_of, shared=shared)).items():
            for part in _split_repeated(same):
                steps = [step for step in (_metadata_of(s).step for s in part) if step is not None]
                step = max(steps, default=None)
                groups.append(
                    ReplicaGroup(run or title_of(pattern), step, number_replicas(part), (Grouping.METADATA(),), run_id)
                )
    return groups


def _metadata_of(snapshot: Snapshot) -> Metadata:
    assert snapshot.metadata is not None
    return snapshot.metadata


def _split_repeated(same: list[Snapshot]) -> list[list[Snapshot]]:
    """Split the files of one pattern by step if a rank appears twice."""
    if len({_metadata_of(s).rank for s in same}) == len(same):
        return [same]
    return list(partition_by(same, lambda s: _metadata_of(s).step).values())
