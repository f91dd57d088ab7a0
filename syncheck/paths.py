"""From what a user typed to the files to open."""

from __future__ import annotations

import contextlib
import glob
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck import readers
from syncheck.errors import CheckpointError, NotACheckpoint, UnreadableFile, UsageError
from syncheck.records import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from syncheck.snapshots import Snapshot


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
    seen: dict[str, bool] = {}
    for path in _expanded(paths):
        before = opened.skipped
        if os.path.isdir(path):
            if not _add_folder(path, opened, seen):
                skipped = opened.skipped - before
                raise UsageError(
                    f"{path}: no checkpoint in this folder ({skipped} other files); needs files of "
                    "torch.save or safetensors. Train with --save-per-rank, or name the right folder."
                )
        elif _place(path) not in seen:
            _add(path, opened)
            seen[_place(path)] = True
    return opened


def _add_folder(folder: str, opened: Opened, seen: dict[str, bool]) -> bool:
    """Open the checkpoints of a folder, and return whether there is any. seen: by path, whether it was taken."""
    any_taken = False
    for found in _walk(folder):
        if isinstance(found, Unreadable):
            opened.unreadable.append(found)
            any_taken = True
            continue
        path = _place(found)
        if path not in seen:
            seen[path] = _add_from_folder(found, opened)
            if seen[path]:
                opened.roots[found] = folder
        any_taken = any_taken or seen[path]
    return any_taken


def _place(path: str) -> str:
    """Return a path from the top, the same however it was written; the shell may know this folder by a link."""
    path, shell = os.path.abspath(path), os.environ.get("PWD", "")
    if path.startswith(f"{shell}/") and os.path.isabs(shell):
        with contextlib.suppress(OSError):
            if os.path.samefile(shell, "."):
                return os.path.join(os.getcwd(), os.path.relpath(path, shell))
    return path


def alike(paths: Iterable[str]) -> dict[str, str]:
    """Return for each path how it is written if all are written in one way: without detours, and from one place.

    Where they mix, those below the current folder are seen from there and all others from the top.
    """
    paths = list(paths)
    kinds = {os.path.isabs(path) for path in paths}
    if len(kinds) < 2:
        return {path: os.path.normpath(path) for path in paths}
    here = f"{os.getcwd()}/"
    return {path: place.removeprefix(here) for path, place in zip(paths, map(_place, paths), strict=True)}


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


def holds_checkpoint(path: str) -> bool:
    """Whether a path is a file that `open_all` would take from a folder, or a folder with such a file in it."""
    if os.path.isdir(path):
        return any(isinstance(found, str) and _is_checkpoint(found) for found in _walk(path))
    return _is_checkpoint(path)


def _is_checkpoint(path: str) -> bool:
    try:
        return path.lower().endswith(readers.ENDINGS) or readers.sniff(path) is not None
    except UnreadableFile:
        return False


def _walk(folder: str) -> Iterator[str | Unreadable]:
    """Yield all files below a folder in a fixed order, and each folder that cannot be entered.

    Hidden files and folders are left alone. Links to folders come last, and each folder is entered once: a link to a
    folder that was entered, or to one above, shows nothing new.
    """
    entered: set[tuple[int, int]] = set()
    with contextlib.suppress(OSError):
        above = Path(folder).resolve().parents
        entered = {(at.st_dev, at.st_ino) for at in map(os.stat, above)}
    waiting, links = [folder], list[str]()
    while waiting or links:
        here = waiting.pop() if waiting else links.pop(0)
        try:
            at = os.stat(here)
            if (at.st_dev, at.st_ino) in entered:
                continue
            entered.add((at.st_dev, at.st_ino))
            with os.scandir(here) as scanned:
                entries = sorted((e for e in scanned if not e.name.startswith(".")), key=lambda e: e.name)
        except OSError as error:
            yield Unreadable(here, f"{(error.strerror or str(error)).lower()}: what lies in this folder is not known")
            continue
        folders = []
        for entry in entries:
            if os.path.isdir(entry.path):
                folders.append(entry)
            else:
                yield entry.path
        waiting += [entry.path for entry in reversed(folders) if not entry.is_symlink()]
        links += [entry.path for entry in folders if entry.is_symlink()]


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
