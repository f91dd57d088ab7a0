"""Find the files of earlier steps of a run: the model before an update."""

from __future__ import annotations

import glob
import os
import re
from typing import TYPE_CHECKING

from syncheck import paths
from syncheck.layout.grouping import group_replicas

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.layout.groups import ReplicaGroup

# Limits of the earlier steps that are opened, and of the files of all steps that are opened to find them.
_MOST_STEPS, _MOST_FILES = 8, 4096
_NUMBER = re.compile(r"\d+")


def find_earlier(files: Sequence[str]) -> Iterator[tuple[str, ReplicaGroup]]:
    """Yield title and files of the earlier steps of a run, the latest step first.

    Other steps have the same path with other numbers, in the name of the file and of its folder.
    files: of one step of the run.
    """
    beside: list[str] = []
    for pattern in dict.fromkeys(map(_make_pattern, files)):
        beside += glob.iglob(pattern)
    if not 1 < len(beside) <= _MOST_FILES:
        return
    opened = paths.open_checkpoints(beside)
    groups = group_replicas(opened.snapshots, roots=opened.roots)
    current = next((group for group in groups if files[0] in _list_paths(group)), None)
    if current is None or current.step is None:
        return
    earlier: dict[int, ReplicaGroup] = {}
    for group in groups:
        if group.run == current.run and group.step is not None and group.step < current.step:
            earlier[group.step] = group
    for step in sorted(earlier, reverse=True)[:_MOST_STEPS]:
        yield f"{current.run} step {step}", earlier[step]


def _list_paths(group: ReplicaGroup) -> list[str]:
    return [snapshot.path for _, snapshot in group.ranks]


def _make_pattern(path: str) -> str:
    """Return a glob for the paths with other numbers in the names of the file and of its folder."""
    home = os.path.dirname(os.path.dirname(path))
    return glob.escape(home) + _NUMBER.sub("*", glob.escape(path[len(home) :]))
