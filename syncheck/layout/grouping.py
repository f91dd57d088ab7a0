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
from collections import defaultdict
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from syncheck.layout.folders import (
    are_folder_copies,
    get_folder,
    have_equal_names,
    have_same_files,
    hold_replicas,
    make_relative_key,
    number_folders,
)
from syncheck.layout.groups import (
    CheckpointGroup,
    are_unique,
    find_last_step,
    find_shared_numbers,
    has_rank_in_metadata,
    make_names_unique,
    number_by_rank,
    number_replicas,
    partition_by,
    template_of,
    title_of,
)
from syncheck.layout.joining import join_hosts
from syncheck.layout.path_numbers import FileKey, split_path
from syncheck.layout.refining import File, find_templates, find_varying, refine_paths, resolve_roles
from syncheck.messages import Grouping

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.path_numbers import PathNumbers, Role
    from syncheck.layout.refining import Template
    from syncheck.messages import Message
    from syncheck.snapshots import Metadata, Snapshot


_NO_PATHS: Mapping[str, str] = MappingProxyType({})


def group_replicas(
    snapshots: Sequence[Snapshot],
    group_by: str | None = None,
    roots: Mapping[str, str] = _NO_PATHS,
    spellings: Mapping[str, str] = _NO_PATHS,
) -> tuple[CheckpointGroup, ...]:
    """Group the snapshots of replicas, ordered by run and step.

    group_by: a regular expression searched in each path. Files with equal captured groups, or equal matches without
    captured groups, form one group.
    roots: the folder in which a file was found, if the user passed a folder.
    spellings: a uniform spelling of each path, if relative and absolute paths are mixed.
    Every snapshot is in exactly one group. Raises re.error for an invalid expression.
    """
    are_uniform = [*spellings] == [*spellings.values()]
    if group_by is None and not are_uniform:
        return _group_by_uniform_paths(snapshots, roots, spellings)

    ordered = []
    for snapshot in sorted(snapshots, key=_make_natural_key):
        ordered.append(replace(snapshot, host=split_path(snapshot.path).host))

    if group_by is not None:
        groups = _group_by_expression(ordered, re.compile(group_by))
    else:
        by_source = partition_by(ordered, has_rank_in_metadata)
        plain = by_source[False]
        # Files with and without metadata may be of one run, so both are grouped before they are joined.
        groups = _group_by_metadata(by_source[True])
        copies = _group_copies(plain, roots)
        if not copies:
            groups += _group_by_names(plain)

        groups = join_hosts(groups) + copies

    groups = make_names_unique(groups)
    groups.sort(key=attrgetter("run", "order"))
    return tuple(groups)


def _group_by_uniform_paths(
    snapshots: Sequence[Snapshot], roots: Mapping[str, str], spellings: Mapping[str, str]
) -> tuple[CheckpointGroup, ...]:
    """Group by uniform paths, but return the user's paths. Parameters as in `group_replicas`."""
    uniform: list[Snapshot] = []
    uniform_roots: dict[str, str] = {}
    user_paths: dict[str, str] = {}
    for snapshot in snapshots:
        path = spellings[snapshot.path]
        uniform.append(replace(snapshot, path=path))
        user_paths[path] = snapshot.path
        if snapshot.path in roots:
            uniform_roots[path] = spellings[roots[snapshot.path]]

    groups = []
    for group in group_replicas(uniform, None, uniform_roots):
        ranks = [(rank, replace(snapshot, path=user_paths[snapshot.path])) for rank, snapshot in group.ranks]
        groups.append(replace(group, ranks=tuple(ranks)))

    return tuple(groups)


def _make_natural_key(snapshot: Snapshot) -> list[tuple[int, int, str]]:
    """Return a sort key that places rank_10 after rank_9."""
    key = []
    for position, part in enumerate(re.split(r"(\d+)", snapshot.path)):
        is_number = position % 2 == 1
        key.append((0, int(part), "") if is_number else (1, 0, part))

    return key


def _group_by_expression(snapshots: Iterable[Snapshot], pattern: re.Pattern[str]) -> list[CheckpointGroup]:
    def make_key(snapshot: Snapshot) -> tuple[str, ...]:
        match = pattern.search(snapshot.path)
        if match is None:
            return ("no match", snapshot.path)

        return match.groups("") or (match.group(),)

    grouping = (Grouping.EXPRESSION(pattern=pattern.pattern),)
    groups = []
    members_by_key = partition_by(snapshots, make_key)
    # An empty match has no name of its own.
    unnamed = "all files" if len(members_by_key) == 1 else "other files"
    for key, members in members_by_key.items():
        group = CheckpointGroup(
            run="-".join(key) or unnamed,
            step=None,
            ranks=number_replicas(members),
            grouping=grouping,
        )
        groups.append(group)

    return groups


class _Launch(NamedTuple):
    """The run of a file by its metadata."""

    run: str | None
    run_id: str | None


def _group_by_metadata(snapshots: Iterable[Snapshot]) -> list[CheckpointGroup]:
    """Group by run and run_id, then by folder and name pattern.

    Different steps do not split files of one folder and pattern, so that stale replicas are found.
    """
    groups: list[CheckpointGroup] = []
    for launch, members in partition_by(snapshots, _get_launch).items():
        shared = find_shared_numbers(members)
        for pattern, candidates in partition_by(members, partial(template_of, shared=shared)).items():
            name = launch.run or title_of(pattern)
            for replicas in _split_repeated(candidates):
                step = find_last_step(map(_get_step, replicas))
                ranks = number_replicas(replicas)
                group = CheckpointGroup(
                    run=name,
                    step=step,
                    ranks=ranks,
                    grouping=(Grouping.METADATA(),),
                    run_id=launch.run_id,
                )
                groups.append(group)

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
    ranks = {_get_metadata(snapshot).rank for snapshot in members}
    if len(ranks) == len(members):
        return [members]

    return list(partition_by(members, _get_step).values())


def _group_copies(snapshots: list[Snapshot], roots: Mapping[str, str]) -> list[CheckpointGroup]:
    """Group folders with equal relative paths, which are copies of each other, path by path.

    Files with one name in several folders are treated likewise if the folders' names differ in words. Folders with
    replicas of their own are runs, which are not compared with each other.
    """
    # Both criteria need all files, because a file outside the folders contradicts copies.
    if have_equal_names(snapshots, roots):
        path = snapshots[0].path
        step = split_path(path).number_of("step")
        return [
            CheckpointGroup(
                run=title_of(path),
                step=step,
                ranks=number_replicas(snapshots),
                grouping=(Grouping.SAME_NAME(),),
            )
        ]

    if not are_folder_copies(snapshots, roots):
        return []

    groups_in_folders = _group_ranks_in_folders(snapshots, roots)
    if hold_replicas(groups_in_folders):
        return groups_in_folders

    groups = []
    for key, members in partition_by(snapshots, partial(make_relative_key, roots=roots)).items():
        ranks = number_folders(members, roots)
        group = CheckpointGroup(
            run=title_of(key.run),
            step=None,
            ranks=ranks,
            grouping=(Grouping.FOLDER_COPIES(),),
        )
        groups.append(group)

    return groups


def _group_ranks_in_folders(snapshots: Iterable[Snapshot], roots: Mapping[str, str]) -> list[CheckpointGroup]:
    """Group the files in each folder that the user passed by the ranks in their names."""
    groups: list[CheckpointGroup] = []
    for members in partition_by(snapshots, partial(get_folder, roots=roots)).values():
        for template in find_templates(refine_paths(members)):
            grouped = _group_template(template) if template.has_replicas else _separate_files(template)
            for group in grouped:
                grouping = (*group.grouping, Grouping.FOLDERS_ARE_RUNS())
                groups.append(replace(group, grouping=grouping))

    return groups


def _group_by_names(snapshots: list[Snapshot]) -> list[CheckpointGroup]:
    """Group by ranks in names, or if no name has a rank, by words."""
    files = refine_paths(snapshots)
    templates = find_templates(files)
    if not any(template.has_replicas for template in templates):
        groups = _group_by_words(files)
        if groups:
            return groups

    groups = []
    for template in templates:
        groups += _group_template(template) if template.has_replicas else _separate_files(template)

    return groups


def _group_by_words(files: Sequence[File]) -> list[CheckpointGroup]:
    """Group files whose names contain no rank and differ in words: a/checkpoint-5 and b/checkpoint-5 are replicas.

    Returns no group if some names differ in numbers only, or if the files are of different steps.
    """
    by_name = _have_equal_folders(files)
    files_by_key = partition_by(files, partial(_make_key_of_words, by_name=by_name))
    if all(map(_differ_in_words, files_by_key.values())):
        return [_make_rankless_group(members) for members in files_by_key.values()]

    # Files with one step are replicas of the files without a step, as step_5.pth and best.pth.
    nameless_keys = {key._replace(run="") for key in files_by_key} - {FileKey(run="")}
    if len(nameless_keys) != 1 or not _differ_in_words(files):
        return []

    (key,) = nameless_keys
    # A path may have several steps, as epoch_1/step_5.pth.
    has_one_step = len(key.step) == 1 and not key.part
    return [_make_rankless_group(files)] if has_one_step else []


def _make_key_of_words(file: File, *, by_name: bool) -> FileKey:
    """Return what replicas have in common if their paths contain no rank: step and part, and often the name.

    Files with a step or part must have the same name, in folders with different words. Other files may have any name,
    because it can be the only word that differs.

    by_name: whether other files must have the same name, too.
    """
    key = file.numbers.key()
    name = "*"
    distinctions = (by_name, key.step, key.part)
    if any(distinctions):
        name = os.path.basename(file.snapshot.path)

    return key._replace(run=name)


def _have_equal_folders(files: Iterable[File]) -> bool:
    """Whether several folders have several files of equal names, as in a/final, a/best, b/final, b/best."""
    contents: dict[str, set[str]] = defaultdict(set)
    for file in files:
        folder, name = os.path.split(file.snapshot.path)
        contents[folder].add(name)

    if not have_same_files(contents):
        return False

    # One file in each folder does not show that its name matters.
    names = next(iter(contents.values()))
    return len(names) > 1


def _differ_in_words(files: Sequence[File]) -> bool:
    """Whether there are several files, and no names differ in numbers only."""
    return len(find_templates(files)) == len(files) > 1


def _make_rankless_group(files: Sequence[File]) -> CheckpointGroup:
    members: list[Snapshot] = []
    moments: set[tuple[tuple[Role, int], ...]] = set()
    for snapshot, numbers in files:
        members.append(snapshot)
        moments.add(numbers.list_common())

    first_moment = files[0].numbers.list_common()
    step: int | None = None
    grouping = Grouping.NO_RANKS()
    if first_moment and moments == {first_moment}:
        step = files[0].numbers.number_of("step")
        grouping = Grouping.NO_RANKS_ONE_STEP()

    return CheckpointGroup(
        run="files",
        step=step,
        ranks=tuple(enumerate(members)),
        grouping=(grouping,),
    )


def _separate_files(template: Template) -> list[CheckpointGroup]:
    """Return a group for each file of a template without a rank."""
    grouping = (_explain_single_files(template.numbers),)
    groups = []
    for snapshot, numbers in template.files:
        name = title_of(numbers.without(*numbers.all_of("step")))
        group = CheckpointGroup(
            run=name,
            step=numbers.number_of("step"),
            ranks=((0, snapshot),),
            grouping=grouping,
        )
        groups.append(group)

    return groups


def _explain_single_files(paths: Sequence[PathNumbers]) -> Message:
    """Return why files that differ only in numbers, without a rank, are no replicas."""
    if find_varying(paths, "shard"):
        return Grouping.SHARDS_ALONE()

    if find_varying(paths, "part"):
        return Grouping.PARTS_ALONE()

    if len(paths) > 1:
        return Grouping.STEPS_ALONE()

    return Grouping.NAME_ALONE()


def _group_template(template: Template) -> list[CheckpointGroup]:
    """Group files whose paths differ only in numbers by their keys."""
    files, grouping = resolve_roles(template)
    groups = []
    for members in partition_by(files, _get_key).values():
        groups.append(_make_group(members, template.rank, grouping))

    return groups


def _get_key(file: File) -> FileKey:
    return file.numbers.key()


def _make_group(files: Sequence[File], rank: int | None, grouping: tuple[Message, ...]) -> CheckpointGroup:
    """Return the group of files with one key.

    rank: position of the rank.
    grouping: how the files were found.
    """
    files = _forget_sizes(files)
    first = files[0].numbers
    members: list[Snapshot] = []
    ranks: list[int | None] = []
    for snapshot, numbers in files:
        mesh = numbers.mesh() or snapshot.mesh
        members.append(replace(snapshot, mesh=mesh))
        # Without the position of a rank, only coordinates in a mesh distinguish the files.
        ranks.append(None if rank is None else numbers.numbers[rank])

    if not are_unique(ranks):
        grouping = _explain_counting(files, grouping)

    name = title_of(first.without(*first.all_of("step"), *first.list_positions("replica")))
    return CheckpointGroup(
        run=name,
        step=first.number_of("step"),
        ranks=number_by_rank(members, ranks),
        grouping=grouping,
    )


def _forget_sizes(files: Sequence[File]) -> Sequence[File]:
    """Return the files without the coordinates that are the size of a mesh in the name of a folder, as in `tp2/`."""
    paths = [file.numbers for file in files]
    first = paths[0]
    texts = {numbers.texts for numbers in paths}
    # Other names have other numbers, and a single file shows nothing.
    if len(files) == 1 or len(texts) > 1:
        return files

    sizes: list[int] = []
    for position in set(first.all_of("mesh")).difference(find_varying(paths, "mesh")):
        # In tp_rank_00_pp_rank_001/, the other number shows that both are coordinates.
        if first.fills_folder(position):
            sizes.append(position)

    resolved = []
    for snapshot, numbers in files:
        resolved.append(File(snapshot, numbers.with_role("plain", sizes)))
    return resolved


def _explain_counting(files: Sequence[File], grouping: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return how files were found that are numbered in the order of their names.

    Their names have ranks within each machine or coordinates in a mesh, or their ranks repeat.
    """
    first = files[0].numbers
    replica_positions = first.list_positions("replica")
    replicas = [file.numbers.select(replica_positions) for file in files]
    if not are_unique(replicas):
        return (Grouping.NUMBERED_BY_ORDER(),)

    if first.mesh():
        return (*grouping, Grouping.COUNTED_OVER_MESH())

    return (*grouping, Grouping.COUNTED_OVER_NODES())
