"""Groups of checkpoints that are replicas of one model and step, and their names."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, TypeVar

from syncheck.frozen import record
from syncheck.layout.path_numbers import split_path
from syncheck.text import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from syncheck.layout.path_numbers import PathNumbers
    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

    K = TypeVar("K")
    V = TypeVar("V")

Ranked = tuple[tuple[int, "Snapshot"], ...]

_FILLER = re.compile(
    r"(?:(?:^|(?<=[-_.]))(?:rank|r|step|global_step|epoch|iter|checkpoint|node|host|node_rank|local_rank)[-_=]?\*|\*)"
)


@record
class CheckpointGroup:
    """The checkpoints of one step of one run, which are replicas, in the order of their ranks."""

    run: str
    """A name for the group."""
    step: int | None
    """The step of the run, if known."""
    ranks: Ranked
    """Each member's rank, or its position if its rank is unknown."""
    grouping: tuple[Message, ...]
    """How the group was found."""
    run_id: str | None = None
    label: str = ""
    """The name without the folder or run_id that distinguishes `run` from other groups of this call, because these
    depend on the machine and the launch."""
    paired: bool = False
    """The ranks of a running job, which pair parameters and buffers by position."""

    @property
    def two_models(self) -> bool:
        """Whether its members are two models, not replicas. Their values are compared as in files, also in memory."""
        return any(isinstance(rank, Side) for rank, _ in self.ranks)

    @property
    def order(self) -> int:
        """The step. Groups without a step come first."""
        return -1 if self.step is None else self.step

    @property
    def has_metadata(self) -> bool:
        """Whether the metadata of a member records its rank."""
        return any(has_rank_in_metadata(snapshot) for _, snapshot in self.ranks)


def partition_by(items: Iterable[V], key: Callable[[V], K]) -> defaultdict[K, list[V]]:
    """Partition items by key, in the order of each key's first item."""
    items_by_key: defaultdict[K, list[V]] = defaultdict(list)
    for item in items:
        items_by_key[key(item)].append(item)

    return items_by_key


def number_replicas(members: Sequence[Snapshot]) -> Ranked:
    """Number replicas by the ranks in their metadata or names if all ranks are unique, else by position."""
    return number_by_rank(members, map(rank_of, members))


def number_by_rank(members: Sequence[Snapshot], ranks: Iterable[int | None]) -> Ranked:
    """Number replicas by their ranks if all ranks are known and unique, else by position."""
    by_rank = dict(zip(list_known(ranks), members, strict=False))
    # A rank is unknown, or several files claim it.
    if len(by_rank) < len(members):
        return tuple(enumerate(members))

    return tuple(sorted(by_rank.items()))


def rank_of(snapshot: Snapshot) -> int | None:
    """Return the rank in a snapshot's metadata, or else in its name."""
    rank = _get_recorded_rank(snapshot)
    return rank_in_path(snapshot) if rank is None else rank


def rank_in_path(snapshot: Snapshot) -> int | None:
    """Return the rank in a snapshot's path."""
    return split_path(snapshot.path).number_of("rank")


def has_rank_in_metadata(snapshot: Snapshot) -> bool:
    """Whether the metadata of a file records its rank."""
    return _get_recorded_rank(snapshot) is not None


def _get_recorded_rank(snapshot: Snapshot) -> int | None:
    return None if snapshot.metadata is None else snapshot.metadata.rank


def find_last_step(steps: Iterable[int | None]) -> int | None:
    """Return the largest known step."""
    return max(list_known(steps), default=None)


def list_known(numbers: Iterable[int | None]) -> list[int]:
    """Return the numbers that are known."""
    return [number for number in numbers if number is not None]


def template_of(snapshot: Snapshot, shared: AbstractSet[str] = frozenset()) -> str:
    """Return the path without extension, with `*` for the numbers of rank and machine.

    Without a rank in the name, `*` replaces the number that equals the metadata's rank, or else the whole file name.
    shared: starts of paths whose next number is no rank, by `find_shared_numbers`.
    """
    parts = split_path(snapshot.path)
    if snapshot.metadata is None or "rank" in parts.roles:
        return parts.without_replica()

    starred = parts.list_positions("replica")
    # The number nearest to the file's own name is most likely its rank.
    for position in reversed(_find_rank_numbers(snapshot)):
        if get_start(parts, position) not in shared:
            return parts.without(*starred, position)

    *folders, _ = parts.without(*starred).split("/")
    return "/".join((*folders, "*"))


def _find_rank_numbers(snapshot: Snapshot) -> list[int]:
    """Return the positions of the unnamed numbers in a path that equal the rank in the metadata."""
    parts = split_path(snapshot.path)
    rank = _get_recorded_rank(snapshot)
    return [position for position in parts.all_of("plain") if parts.numbers[position] == rank]


def find_shared_numbers(members: Sequence[Snapshot]) -> set[str]:
    """Return the starts of paths whose next number names a folder of several ranks, like `exp` of exp0/.

    A number in a folder's name is the rank only if it is the rank of each file below such folders.
    members: files with metadata.
    """
    shared: set[str] = set()
    for snapshot in members:
        parts = split_path(snapshot.path)
        for position in set(parts.all_of("plain")).difference(_find_rank_numbers(snapshot)):
            if parts.folders[position]:
                shared.add(get_start(parts, position))

    return shared


def get_start(parts: PathNumbers, position: int) -> str:
    """Return the path before a number, with `*` for earlier numbers."""
    return "*".join(parts.texts[: position + 1])


def title_of(pattern: str) -> str:
    """Return the last path segment with more than rank and step: ckpts/ddp_rank* gives ddp."""
    for segment in reversed(pattern.split("/")):
        title = _FILLER.sub("", segment).strip("-_. /")
        if title:
            return title

    return "files"


def make_names_unique(groups: list[CheckpointGroup]) -> list[CheckpointGroup]:
    """Make the names of runs unique: groups differ if their run_id differs, or if a step repeats within a run.

    Such a group is named after its run's common folder; runs in one folder also get their run_id.
    """
    unique: list[CheckpointGroup] = []
    for run, groups_of_run in partition_by(groups, attrgetter("run")).items():
        names, folders = _name_groups(run, groups_of_run)
        for group, name, segments in zip(groups_of_run, names, _strip_common(folders), strict=True):
            unique.append(replace(group, run=name, label="/".join((*segments, run))))

    return unique


def _name_groups(run: str, groups: Sequence[CheckpointGroup]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the name of each group of a run, and the segments of the folder in its name."""
    launches = partition_by(groups, attrgetter("run_id"))
    folder_of_launch: dict[str | None, str] = {}
    for run_id, groups_of_launch in launches.items():
        folder_of_launch[run_id] = _find_common_folder(groups_of_launch)

    launch_folders = list(folder_of_launch.values())
    has_repeated_step = len({group.step for group in groups}) < len(groups)
    names: list[str] = []
    folders: list[tuple[str, ...]] = []
    for group in groups:
        folder = folder_of_launch[group.run_id]
        is_named_after_folder = len(launches) > 1
        if group.run_id is None and has_repeated_step:
            # Only its own folder distinguishes this group.
            folder = os.path.dirname(group.ranks[0][1].path)
            is_named_after_folder = True

        # A folder is known to the user, and a run_id is not.
        name = run
        if is_named_after_folder and folder:
            name = f"{folder}/{run}"

        if group.run_id is not None and launch_folders.count(folder) > 1:
            name = f"{name} ({group.run_id[:8]})"

        names.append(name)
        folders.append(_list_folders(folder) if is_named_after_folder else ())

    return names, folders


def _list_folders(folder: str) -> tuple[str, ...]:
    """Return the segments of a folder's path without ranks and steps, which vary with the given files."""
    parts = split_path(folder)
    starred = [*parts.all_of("rank"), *parts.all_of("local"), *parts.all_of("step")]
    segments = parts.without(*starred).split("/")
    return tuple(segment for segment in segments if segment not in ("", "."))


def _strip_common(folders: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Remove the common segments at the start and end of all paths."""
    # At the start, and after reversing, at the end.
    for _ in range(2):
        common = _count_common(folders)
        folders = [segments[common:][::-1] for segments in folders]

    return folders


def _count_common(folders: Sequence[tuple[str, ...]]) -> int:
    """Return the number of segments with which all paths start."""
    common = 0
    for segments in zip(*folders, strict=False):
        if len(set(segments)) > 1:
            break

        common += 1

    return common


def _find_common_folder(groups: Iterable[CheckpointGroup]) -> str:
    """Return the folder that contains the files of all groups, or else that of the first file."""
    folders: list[str] = []
    for group in groups:
        folders += [os.path.dirname(snapshot.path) for _, snapshot in group.ranks]

    try:
        return os.path.commonpath(folders)
    except ValueError:  # absolute and relative paths in one call
        return folders[0]


def select_last_steps(groups: Sequence[CheckpointGroup]) -> tuple[CheckpointGroup, ...]:
    """Return the last step's group of each run with several replicas; for repeated steps, the first group."""
    # Reversed, so that the first group of a repeated step is the last one that the dictionary keeps.
    several = [group for group in reversed(groups) if len(group.ranks) > 1]
    last_groups: dict[str, CheckpointGroup] = {}
    for group in sorted(several, key=attrgetter("order")):
        last_groups[group.run] = group

    return tuple(last_groups.values())


def group_by_step(groups: Iterable[CheckpointGroup]) -> dict[str, dict[int, CheckpointGroup]]:
    """Map run and step to groups with a known step; for repeated steps, the first group."""
    runs: dict[str, dict[int, CheckpointGroup]] = defaultdict(dict)
    for group in groups:
        if group.step is not None:
            runs[group.run].setdefault(group.step, group)

    return {run: dict(sorted(steps.items())) for run, steps in runs.items()}


def are_unique(items: Collection[object]) -> bool:
    """Whether no item repeats."""
    return len(set(items)) == len(items)
