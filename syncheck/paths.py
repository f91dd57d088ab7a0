"""From what a user typed to the files to open."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from syncheck import readers
from syncheck.errors import CheckpointError, NotACheckpoint, UnreadableFile, UsageError
from syncheck.records import Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Snapshot


@dataclass
class Opened:
    """The checkpoints found under the paths given.

    roots: for each file found in a folder, that folder. skipped: files in folders that are no checkpoints.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)
    skipped: int = 0


def open_all(paths: Sequence[str]) -> Opened:
    """Open every checkpoint under the paths: files, folders, or globs that the shell did not expand.

    A path named by the user that cannot be opened is kept as unreadable. In a folder, files that are no checkpoints
    are counted and skipped, but one with a checkpoint's ending is never passed over in silence.
    Raises UsageError for a glob without a match and a folder without a checkpoint.
    """
    opened = Opened()
    # A path written in two ways is one file. Links are not followed: a store of equal contents may keep them once.
    seen: set[str] = set()
    for path in _expanded(paths):
        if os.path.isdir(path):
            before = len(opened.snapshots) + len(opened.unreadable)
            skipped = opened.skipped
            for found in _files(path):
                if os.path.abspath(found) not in seen and _add_from_folder(found, opened):
                    opened.roots[found] = path
                seen.add(os.path.abspath(found))
            if len(opened.snapshots) + len(opened.unreadable) == before:
                raise UsageError(
                    f"{path}: no checkpoint in this folder ({opened.skipped - skipped} other files); needs files of "
                    "torch.save or safetensors. Train with --save-per-rank, or name the right folder."
                )
        elif os.path.abspath(path) not in seen:
            _add(path, opened)
        seen.add(os.path.abspath(path))
    return opened


def _expanded(paths: Sequence[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        if os.path.lexists(path) or not glob.has_magic(path):
            found.append(path)
            continue
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise UsageError(
                f"{path}: no file matches this pattern. Check the folder, or quote it to let syncheck expand it."
            )
        found += matches
    return found


def _files(folder: str) -> list[str]:
    """All files below a folder in a fixed order; hidden ones and hidden folders are left alone."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [os.path.join(root, name) for name in sorted(names) if not name.startswith(".")]
    return found


def _add(path: str, opened: Opened) -> None:
    try:
        opened.snapshots.append(readers.read(path))
    except CheckpointError as error:
        opened.unreadable.append(Unreadable(path, error.reason))


def _add_from_folder(path: str, opened: Opened) -> bool:
    """Open a file of a folder if it is a checkpoint by ending or content; return whether it was taken."""
    if path.lower().endswith(readers.ENDINGS):
        _add(path, opened)
        return True
    try:
        if readers.sniff(path) is not None:
            opened.snapshots.append(readers.read(path))
            return True
    except (NotACheckpoint, UnreadableFile):
        pass  # a zip of something else; a pipe or a dangling link that is no checkpoint by its name
    except CheckpointError as error:
        opened.unreadable.append(Unreadable(path, error.reason))
        return True
    opened.skipped += 1
    return False
