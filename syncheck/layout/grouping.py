"""Group the files of replicas.

The criteria, in this order: metadata blocks; folders that are copies of each other; ranks in known names; the only
varying number of otherwise equal names; or else all files form one group. The criterion is recorded and
printed.

Each criterion gives each file a key: the run, the step and the part of the checkpoint, with everything else starred.
Files with equal keys are replicas. The role of each number in a path determines what it is in the key
(`path_numbers.USES`). Then groups with different ranks of one run are joined (`joining`).
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from syncheck.layout.groups import (
    Ranked,
    ReplicaGroup,
    are_unique,
    find_shared_numbers,
    has_rank_in_metadata,
    make_names_unique,
    number_replicas,
    partition_by,
    template_of,
    title_of,
)
from syncheck.layout.joining import join_hosts
from syncheck.layout.path_numbers import FileKey, split_path
from syncheck.layout.refining import find_templates, find_varying, refine_paths, resolve_roles
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.path_numbers import PathNumbers
    from syncheck.layout.refining import Template
    from syncheck.messages import Message
    from syncheck.snapshots import Metadata, Snapshot


def group_replicas(
    snapshots: Sequence[Snapshot],
    group_by: str | None = None,
    roots: Mapping[str, str] | None = None,
    alike: Mapping[str, str] | None = None,
) -> tuple[ReplicaGroup, ...]:
    """Group the snapshots of replicas, ordered by run and step.

    group_by: a regular expression searched in each path. Files with equal captured groups, or equal matches without
    captured groups, form one group.
    roots: the folder in which a file was found, if the user passed a folder.
    alike: a uniform spelling of each path, if relative and absolute paths are mixed.
    Every snapshot is in exactly one group. Raises re.error for an invalid expression.
    """
    if group_by is None and alike is not None and any(path != alike[path] for path in alike):
        return _group_by_uniform_paths(snapshots, roots or {}, alike)

    ordered = []
    for snapshot in sorted(snapshots, key=lambda snapshot: _make_natural_key(snapshot.path)):
        ordered.append(replace(snapshot, host=split_path(snapshot.path).host))

    if group_by is not None:
        groups = _group_by_expression(ordered, re.compile(group_by))
    else:
        described = [snapshot for snapshot in ordered if has_rank_in_metadata(snapshot)]
        plain = [snapshot for snapshot in ordered if not has_rank_in_metadata(snapshot)]
        # Files with and without metadata may be of one run, so both are grouped before they are joined.
        groups = _group_by_metadata(described)
        copies = _group_copies(plain, roots or {})
        if not copies:
            groups += _group_by_names(plain)

        groups = join_hosts(groups) + copies

    groups = make_names_unique(groups)
    groups.sort(key=lambda group: (group.run, -1 if group.step is None else group.step))
    return tuple(groups)


def _group_by_uniform_paths(
    snapshots: Sequence[Snapshot], roots: Mapping[str, str], alike: Mapping[str, str]
) -> tuple[ReplicaGroup, ...]:
    """Group by uniform paths, but return the user's paths. Parameters as in `group_replicas`."""
    user_paths = {alike[snapshot.path]: snapshot.path for snapshot in snapshots}
    uniform_roots = {alike[path]: alike[folder] for path, folder in roots.items() if path in alike}
    uniform = [replace(snapshot, path=alike[snapshot.path]) for snapshot in snapshots]
    groups = []
    for group in group_replicas(uniform, None, uniform_roots):
        ranks = [(rank, replace(snapshot, path=user_paths[snapshot.path])) for rank, snapshot in group.ranks]
        groups.append(replace(group, ranks=tuple(ranks)))

    return tuple(groups)


def _make_natural_key(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that places rank_10 after rank_9."""
    key = []
    for position, part in enumerate(re.split(r"(\d+)", text)):
        is_number = position % 2 == 1
        key.append((0, int(part), "") if is_number else (1, 0, part))

    return key


def _group_by_expression(snapshots: Iterable[Snapshot], pattern: re.Pattern[str]) -> list[ReplicaGroup]:
    def make_key(snapshot: Snapshot) -> tuple[str, ...]:
        match = pattern.search(snapshot.path)
        if match is None:
            return ("no match", snapshot.path)

        return match.groups("") or (match.group(),)

    grouping = (Grouping.EXPRESSION(pattern=pattern.pattern),)
    groups = []
    for key, members in partition_by(snapshots, make_key).items():
        groups.append(ReplicaGroup("-".join(key), None, number_replicas(members), grouping))

    return groups


class _Launch(NamedTuple):
    """The run of a file by its metadata."""

    run: str | None
    run_id: str | None


def _group_by_metadata(snapshots: Iterable[Snapshot]) -> list[ReplicaGroup]:
    """Group by run and run_id, then by folder and name pattern.

    Different steps do not split files of one folder and pattern, so that stale replicas are found.
    """
    groups: list[ReplicaGroup] = []
    for launch, members in partition_by(snapshots, _get_launch).items():
        shared = find_shared_numbers(members)
        for pattern, candidates in partition_by(members, partial(template_of, shared=shared)).items():
            name = launch.run or title_of(pattern)
            for replicas in _split_repeated(candidates):
                recorded_steps = [_get_step(snapshot) for snapshot in replicas]
                step = max((step for step in recorded_steps if step is not None), default=None)
                ranks = number_replicas(replicas)
                groups.append(ReplicaGroup(name, step, ranks, (Grouping.METADATA(),), launch.run_id))

    return groups


def _get_metadata(snapshot: Snapshot) -> Metadata:
    assert snapshot.metadata is not None
    return snapshot.metadata


def _get_launch(snapshot: Snapshot) -> _Launch:
    metadata = _get_metadata(snapshot)
    return _Launch(metadata.run, metadata.run_id)


def _get_step(snapshot: Snapshot) -> int | None:
    return _get_metadata(snapshot).step


def _split_repeated(members: list[Snapshot]) -> list[list[Snapshot]]:
    """Split the files of one pattern by step if a rank appears twice."""
    ranks = [_get_metadata(snapshot).rank for snapshot in members]
    if are_unique(ranks):
        return [members]

    return list(partition_by(members, _get_step).values())


def _group_copies(snapshots: list[Snapshot], roots: Mapping[str, str]) -> list[ReplicaGroup]:
    """Group folders with equal relative paths, which are copies of each other, path by path.

    Files with one name in several folders are treated likewise if the folders' names differ in words.
    """
    # Both criteria need all files, because a file outside the folders contradicts copies.
    if _have_equal_names(snapshots, roots):
        path = snapshots[0].path
        step = split_path(path).number_of("step")
        return [ReplicaGroup(title_of(path), step, number_replicas(snapshots), (Grouping.SAME_NAME(),))]

    if not _are_folder_copies(snapshots, roots):
        return []

    groups = []
    for key, members in partition_by(snapshots, lambda snapshot: _make_relative_key(snapshot, roots)).items():
        ranks = _number_folders(members, roots)
        groups.append(ReplicaGroup(title_of(key.run), None, ranks, (Grouping.FOLDER_COPIES(),)))

    return groups


def _make_relative_key(snapshot: Snapshot, roots: Mapping[str, str]) -> FileKey:
    """Return the key of a file in a copied folder: its path in the folder, with the folder starred."""
    return FileKey(os.path.relpath(snapshot.path, roots[snapshot.path]))


def _have_equal_names(snapshots: Sequence[Snapshot], roots: Mapping[str, str]) -> bool:
    """Whether files that the user passed one by one have one name in several folders with ranks."""
    paths = [split_path(snapshot.path) for snapshot in snapshots if snapshot.path not in roots]
    if len(paths) < 2 or len(paths) < len(snapshots):
        return False

    # Without ranks, the criterion of words groups them.
    if any("rank" not in numbers.roles for numbers in paths):
        return False

    names = {os.path.basename(snapshot.path) for snapshot in snapshots}
    moments = {numbers.fixed() for numbers in paths}
    return len(names) == len(moments) == 1 and are_unique([numbers.texts for numbers in paths])


def _are_folder_copies(snapshots: Sequence[Snapshot], roots: Mapping[str, str]) -> bool:
    """Whether the folders that the user passed contain all files, and have equal contents."""
    contents: dict[str, set[str]] = {}
    for snapshot in snapshots:
        folder = roots.get(snapshot.path)
        if folder is None:
            return False

        contents.setdefault(folder, set()).add(os.path.relpath(snapshot.path, folder))

    # Copies of a folder hold the same files.
    first_content, *other_contents = contents.values() or [set[str]()]
    if not other_contents or any(content != first_content for content in other_contents):
        return False

    folders = [split_path(folder) for folder in contents]
    has_one_text = len({numbers.texts for numbers in folders}) == 1
    # Folders whose names differ in numbers may be steps or machines of one run.
    return not (has_one_text and (find_varying(folders, "step") or find_varying(folders, "node")))


def _number_folders(members: Sequence[Snapshot], roots: Mapping[str, str]) -> Ranked:
    """Number files by the ranks in the names of their folders if all ranks are unique, else by position."""
    ranks: list[int] = []
    for snapshot in members:
        rank = split_path(roots[snapshot.path]).number_of("rank")
        if rank is not None:
            ranks.append(rank)

    if len(set(ranks)) < len(members):
        return tuple(enumerate(members))

    return tuple(zip(ranks, members, strict=True))


def _group_by_names(snapshots: list[Snapshot]) -> list[ReplicaGroup]:
    """Group by ranks in names, or if no name has a rank, by words."""
    paths = refine_paths(snapshots)
    templates = find_templates(snapshots, paths)
    if not any(template.has_replicas for template in templates):
        groups = _group_by_words(snapshots, paths)
        if groups:
            return groups

    groups = []
    for template in templates:
        groups += _group_template(template) if template.has_replicas else _separate_files(template)

    return groups


def _group_by_words(snapshots: list[Snapshot], paths: Mapping[str, PathNumbers]) -> list[ReplicaGroup]:
    """Group files whose names contain no rank and differ in words: a/checkpoint-5 and b/checkpoint-5 are replicas.

    Returns no group if some names differ in numbers only, or if the files are of different steps.
    """
    has_equal_folders = _have_equal_folders(snapshots)
    keys: dict[str, FileKey] = {}
    for snapshot in snapshots:
        key = paths[snapshot.path].key()
        # Without a step or part, the names of files may be the only words that differ.
        has_moment = bool(key.step or key.part)
        name = os.path.basename(snapshot.path) if has_moment or has_equal_folders else "*"
        keys[snapshot.path] = FileKey(name, key.step, key.part)

    members_by_key = partition_by(snapshots, lambda snapshot: keys[snapshot.path])
    if all(_differ_in_words(members, paths) for members in members_by_key.values()):
        return [_make_rankless_group(members, paths) for members in members_by_key.values()]

    # A file with a step in its name among files without steps, as in best.pth and step_5.pth.
    moments = {(key.step, key.part) for key in keys.values() if key.step or key.part}
    if len(moments) != 1 or not _differ_in_words(snapshots, paths):
        return []

    ((steps, part),) = moments
    return [_make_rankless_group(snapshots, paths)] if len(steps) == 1 and not part else []


def _have_equal_folders(snapshots: Sequence[Snapshot]) -> bool:
    """Whether several folders have several files of equal names, as in a/final, a/best, b/final, b/best."""
    contents: dict[str, set[str]] = {}
    for snapshot in snapshots:
        folder, name = os.path.split(snapshot.path)
        contents.setdefault(folder, set()).add(name)

    distinct = {frozenset(names) for names in contents.values()}
    return len(contents) > 1 and len(distinct) == 1 and len(min(distinct, key=len)) > 1


def _differ_in_words(members: Sequence[Snapshot], paths: Mapping[str, PathNumbers]) -> bool:
    """Whether there are several files, and no names differ in numbers only."""
    return len(members) > 1 and are_unique([paths[snapshot.path].texts for snapshot in members])


def _make_rankless_group(members: list[Snapshot], paths: Mapping[str, PathNumbers]) -> ReplicaGroup:
    moments = {paths[snapshot.path].fixed() for snapshot in members}
    step: int | None = None
    grouping = Grouping.NO_RANKS()
    if len(moments) == 1 and moments != {()}:
        step = paths[members[0].path].number_of("step")
        grouping = Grouping.NO_RANKS_ONE_STEP()

    return ReplicaGroup("files", step, tuple(enumerate(members)), (grouping,))


def _separate_files(template: Template) -> list[ReplicaGroup]:
    """Return a group for each file of a template without a rank."""
    grouping = (_explain_single_files(template.numbers),)
    groups = []
    for snapshot, numbers in zip(template.members, template.numbers, strict=True):
        name = title_of(numbers.without(*numbers.all_of("step")))
        groups.append(ReplicaGroup(name, numbers.number_of("step"), ((0, snapshot),), grouping))

    return groups


def _explain_single_files(paths: Sequence[PathNumbers]) -> Message:
    """Return why files that differ only in numbers, without a rank, are no replicas."""
    if find_varying(paths, "shard"):
        return Grouping.SHARDS_ALONE()

    if find_varying(paths, "part"):
        return Grouping.PARTS_ALONE()

    return Grouping.STEPS_ALONE() if len(paths) > 1 else Grouping.NAME_ALONE()


def _group_template(template: Template) -> list[ReplicaGroup]:
    """Group files whose paths differ only in numbers by their keys."""
    resolved, grouping = resolve_roles(template)
    files = list(zip(resolved, template.members, strict=True))
    groups = []
    for members in partition_by(files, lambda file: file[0].key()).values():
        groups.append(_make_group(members, template.rank, grouping))

    return groups


def _make_group(
    members: Sequence[tuple[PathNumbers, Snapshot]], rank: int | None, grouping: tuple[Message, ...]
) -> ReplicaGroup:
    """Return the group of files with one key.

    members: files with the numbers in their paths.
    rank: position of the rank.
    grouping: how the files were found.
    """
    first, _ = members[0]
    replica_positions = first.list_replica_numbers()
    ranked = []
    for numbers, snapshot in members:
        number = -1 if rank is None else numbers.numbers[rank]
        ranked.append((number, replace(snapshot, mesh=numbers.mesh() or snapshot.mesh)))

    if not are_unique([number for number, _ in ranked]):
        # Ranks within each machine or coordinates in a mesh: number the members in the order of their names.
        ranked = [(number, snapshot) for number, (_, snapshot) in enumerate(ranked)]
        replicas = [tuple(numbers.numbers[position] for position in replica_positions) for numbers, _ in members]
        if not are_unique(replicas):
            grouping = (Grouping.NUMBERED_BY_ORDER(),)
        elif first.mesh():
            grouping += (Grouping.COUNTED_OVER_MESH(),)
        else:
            grouping += (Grouping.COUNTED_OVER_NODES(),)

    # The natural order of names is not the order of ranks if several numbers vary.
    ranked.sort(key=lambda pair: pair[0])
    name = title_of(first.without(*first.all_of("step"), *replica_positions))
    return ReplicaGroup(name, first.number_of("step"), tuple(ranked), grouping)
