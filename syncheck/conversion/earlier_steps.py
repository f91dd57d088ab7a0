"""Find the files of earlier steps of a run: the model before an update."""

from __future__ import annotations

import glob
import os
import re
from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.layout.grouping import group_replicas
from syncheck.layout.groups import partition_by
from syncheck.readers import find

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.layout.groups import CheckpointGroup

# Limits of the earlier steps that are opened, and of the files of all steps that are opened to find them.
_MOST_STEPS, _MOST_FILES = 8, 4096
_NUMBER = re.compile(r"\d+")


def find_earlier(files: Sequence[str]) -> Iterator[tuple[str, CheckpointGroup]]:
    """Yield title and files of the earlier steps of a run, the latest step first.

    Other steps have the same path with other numbers, in the name of the file and of its folder.
    files: of one step of the run.
    """
    groups = _group_all_steps(files)
    current = _index_by_path(groups).get(files[0])
    if current is None or current.step is None:
        return
    runs = partition_by(groups, attrgetter("run"))
    groups_by_step = _index_by_step(runs[current.run])
    steps = sorted(groups_by_step)
    # The list has the current step, and all steps before it are earlier.
    earlier_steps = steps[: steps.index(current.step)]
    latest_steps = earlier_steps[-_MOST_STEPS:]
    for step in reversed(latest_steps):
        title = f"{current.run} step {step}"
        yield title, groups_by_step[step]


def _group_all_steps(files: Sequence[str]) -> Sequence[CheckpointGroup]:
    """Return the groups of all files whose paths differ from the files of one step in numbers only."""
    # The files of all ranks usually share one pattern.
    patterns = dict.fromkeys(_make_pattern(path) for path in files)
    candidates: list[str] = []
    for pattern in patterns:
        candidates += glob.iglob(pattern)
    if not 1 < len(candidates) <= _MOST_FILES:
        return ()
    opened = find.open_checkpoints(candidates)
    return group_replicas(opened.snapshots, roots=opened.roots)


def _index_by_path(groups: Sequence[CheckpointGroup]) -> dict[str, CheckpointGroup]:
    """Return the group of each file."""
    groups_by_path = {}
    for group in groups:
        for _, snapshot in group.ranks:
            groups_by_path[snapshot.path] = group
    return groups_by_path


def _index_by_step(groups: Sequence[CheckpointGroup]) -> dict[int, CheckpointGroup]:
    """Return the groups of a run by step, without groups of an unknown step."""
    return {group.step: group for group in groups if group.step is not None}


def _make_pattern(path: str) -> str:
    """Return a glob for the paths with other numbers in the names of the file and of its folder."""
    folder = os.path.dirname(path)
    parent = os.path.dirname(folder)
    # Special characters are escaped in both parts: a folder may be called `run[a]`.
    varying_names = _NUMBER.sub("*", glob.escape(path[len(parent) :]))
    return glob.escape(parent) + varying_names
