"""Decide whether the folders that the user passed are copies of each other, or runs with replicas of their own."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.layout.dtensors import is_sharded
from syncheck.layout.groups import Ranked, number_by_rank
from syncheck.layout.path_numbers import FileKey, split_path
from syncheck.layout.refining import find_varying

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.layout.path_numbers import Role
    from syncheck.snapshots import Snapshot


def get_folder(snapshot: Snapshot, roots: Mapping[str, str]) -> str:
    """Return the folder that the user passed, in which a file was found."""
    return roots[snapshot.path]


def make_relative_key(snapshot: Snapshot, roots: Mapping[str, str]) -> FileKey:
    """Return the key of a file in a copied folder: its path in the folder, with the folder starred."""
    return FileKey(os.path.relpath(snapshot.path, roots[snapshot.path]))


def hold_replicas(groups: Iterable[CheckpointGroup]) -> bool:
    """Whether a group by names has several replicas, and not only ranks with shards of a model."""
    for group in groups:
        _, first = group.ranks[0]
        if len(group.ranks) > 1 and not any(map(is_sharded, first.tensors.values())):
            return True

    return False


def have_equal_names(snapshots: Sequence[Snapshot], roots: Mapping[str, str]) -> bool:
    """Whether files that the user passed one by one have one name in several folders with ranks."""
    names: set[str] = set()
    moments: set[tuple[tuple[Role, int], ...]] = set()
    texts: set[tuple[str, ...]] = set()
    for snapshot in snapshots:
        numbers = split_path(snapshot.path)
        # Without ranks, the criterion of words groups them.
        if snapshot.path in roots or "rank" not in numbers.roles:
            return False

        names.add(os.path.basename(snapshot.path))
        moments.add(numbers.list_common())
        texts.add(numbers.texts)

    has_one_name = len(names) == len(moments) == 1
    return has_one_name and len(texts) == len(snapshots) > 1


def are_folder_copies(snapshots: Sequence[Snapshot], roots: Mapping[str, str]) -> bool:
    """Whether the folders that the user passed contain all files, and have equal contents."""
    contents: dict[str, set[str]] = defaultdict(set)
    for snapshot in snapshots:
        folder = roots.get(snapshot.path)
        if folder is None:
            return False

        contents[folder].add(os.path.relpath(snapshot.path, folder))

    if not have_same_files(contents):
        return False

    folders = [split_path(folder) for folder in contents]
    have_other_words = len({numbers.texts for numbers in folders}) > 1
    # Folders whose names differ in numbers may be steps or machines of one run.
    moving_numbers = find_varying(folders, "step") + find_varying(folders, "node")
    return have_other_words or not moving_numbers


def have_same_files(contents: Mapping[str, set[str]]) -> bool:
    """Whether there are several folders with the same files. contents: the names of files, by folder."""
    distinct = {frozenset(names) for names in contents.values()}
    return len(contents) > 1 and len(distinct) == 1


def number_folders(members: Sequence[Snapshot], roots: Mapping[str, str]) -> Ranked:
    """Number files by the ranks in the names of their folders if all ranks are unique, else by position."""
    ranks = [split_path(roots[snapshot.path]).number_of("rank") for snapshot in members]
    return number_by_rank(members, ranks)
