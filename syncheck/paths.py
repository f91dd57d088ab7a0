"""From what a user typed to the files to open."""

from __future__ import annotations

import contextlib
import glob
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck import readers
from syncheck.errors import CheckpointError, NotACheckpoint, UnreadableFile, UsageError
from syncheck.messages import names_text
from syncheck.omissions import unlike_siblings
from syncheck.records import Alias, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

    from syncheck.snapshots import Snapshot


@dataclass
class Opened:
    """The checkpoints found under the paths given.

    roots: for each checkpoint found in a folder, that folder. skipped: number of files in folders that are no
    checkpoints. aliases: links to folders that were entered under another name.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    aliases: list[Alias] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Whole:
    """A folder that is itself one checkpoint."""

    path: str


def open_all(paths: Sequence[str]) -> Opened:
    """Open every checkpoint under the paths: files, folders, or globs that the shell did not expand.

    A folder that is itself a checkpoint is one, wherever it is found, and its files are none of their own. A path named
    by the user that cannot be opened is kept as unreadable. In a folder, files that are no checkpoints are counted and
    skipped, but one with a checkpoint's ending, or named like a checkpoint there, is unreadable.
    Raises UsageError for a glob without a match and a folder without a checkpoint.
    """
    opened = Opened()
    seen: dict[str, bool] = {}  # a path written in two ways is one file
    for path in _expanded(paths):
        before = opened.skipped
        if os.path.isdir(path):
            # The shell completes a folder's name with a slash, behind which no name is left to take a rank from.
            if not _add_folder(path.rstrip("/") or path, opened, seen):
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
    taken: list[str] = []
    others: list[str] = []
    unreadable = len(opened.unreadable)
    for found in _walk(folder):
        if isinstance(found, Unreadable):
            opened.unreadable.append(found)
            continue
        if isinstance(found, Alias):
            opened.aliases.append(found)
            continue
        path = found.path if isinstance(found, Whole) else found
        place = _place(path)
        if place not in seen:
            if isinstance(found, Whole):
                seen |= dict.fromkeys(map(_place, _add(path, opened)), True)
                seen[place] = True
            else:
                seen[place] = not path.endswith("/") and _add_from_folder(path, opened)
            if seen[place]:
                opened.roots[path] = folder
        (taken if seen[place] else others).append(path)
    if taken == [folder]:
        opened.roots.pop(folder, None)  # it was named itself, and nothing in it
    opened.unreadable += unlike_siblings(folder, taken, others)
    return bool(taken) or len(opened.unreadable) > unreadable


def _place(path: str) -> str:
    """Return a path from the top, the same however it was written; the shell may know this folder by a link."""
    try:
        if "/../" in f"{path}/":  # above a folder that is a link lies the folder that the link leads to
            above, _, rest = f"{path}/".rpartition("/../")
            path = os.path.join(os.path.realpath(f"{above}/.."), rest)
        path, shell = os.path.abspath(path), os.environ.get("PWD", "")
    except FileNotFoundError:
        raise UsageError(f"{path}: the current folder was removed; go to one that is there") from None
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
            raise UsageError(f"{path}: no file matches this pattern. {_beside(path)}")
        found += matches
    return found


def _beside(pattern: str) -> str:
    """Say what is where a pattern was to match: a folder that is not there, or some of what it holds."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    try:
        names = sorted(name for name in os.listdir(folder or ".") if not name.startswith("."))
    except OSError as error:
        return f"{folder}: {UnreadableFile.because(folder, error).reason}."
    return f"{folder or 'This folder'} holds {names_text(names, 2) or 'nothing'}."


def holds_checkpoint(path: str) -> bool:
    """Whether a path is a file that `open_all` would take from a folder, or a folder with a checkpoint in it."""
    if os.path.isdir(path):
        return any(
            isinstance(found, Whole) or (isinstance(found, str) and _is_checkpoint(found)) for found in _walk(path)
        )
    return _is_checkpoint(path)


def _is_checkpoint(path: str) -> bool:
    if os.path.basename(path) in readers.SETTINGS:
        return False
    try:
        return path.lower().endswith(readers.ENDINGS) or readers.sniff(path) is not None
    except UnreadableFile:
        return False


def _walk(folder: str) -> Iterator[str | Whole | Alias | Unreadable]:
    """Yield all files below a folder in a fixed order, folders with a slash, and each that cannot be entered.

    A folder that is one checkpoint comes in place of the files that belong to it. Hidden files and folders are left
    alone. Links to folders come last, and each folder is entered once: a link to a folder that was entered is an alias,
    and one to a folder above shows nothing new.
    """
    entered: dict[tuple[int, int], str] = {}
    with contextlib.suppress(OSError):
        above = Path(folder).resolve().parents
        entered = {(at.st_dev, at.st_ino): "" for at in map(os.stat, above)}
    waiting, links = [_Inside(folder)], list[_Inside]()
    while waiting or links:
        inside = waiting.pop() if waiting else links.pop(0)
        here = inside.path
        try:
            at = os.stat(here)
            known = entered.setdefault((at.st_dev, at.st_ino), here)
            if known != here:
                if known:
                    yield Alias(here, known)
                continue
            entries = _visible(here)
            reader = readers.sniff_folder(here)
        except (OSError, UnreadableFile) as error:
            wrong = error if isinstance(error, UnreadableFile) else UnreadableFile.because(here, error)
            yield Unreadable(here, f"{wrong.reason}: what lies in this folder is not known")
            continue
        if reader is not None:
            inside = _Inside(here, here, reader)
            yield Whole(here)
        folders = []
        for entry in entries:
            # Of a path that is too long for the system, only the entry itself says that it is a folder.
            if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path):
                folders.append(entry)
            elif not inside.belongs(entry.path):
                yield entry.path
        if here != folder and reader is None:
            yield f"{here}/"
        waiting += [replace(inside, path=entry.path) for entry in reversed(folders) if not entry.is_symlink()]
        links += [replace(inside, path=entry.path) for entry in folders if entry.is_symlink()]


@dataclass(frozen=True, slots=True)
class _Inside:
    """A folder to enter. whole: the folder at or above it that is one checkpoint, if any; reader: of that."""

    path: str
    whole: str = ""
    reader: ModuleType | None = None

    def belongs(self, path: str) -> bool:
        """Whether a file is part of the checkpoint that the folder lies in."""
        return self.reader is not None and bool(self.reader.holds(os.path.relpath(path, self.whole)))


def _visible(folder: str) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as scanned:
        return sorted((entry for entry in scanned if not entry.name.startswith(".")), key=lambda entry: entry.name)


def _add(path: str, opened: Opened) -> set[str]:
    """Open a checkpoint that was named or found, and return the files that its tensors lie in."""
    try:
        snapshot = readers.read(path)
    except CheckpointError as error:
        inside = "" if error.path == path else f"{os.path.relpath(error.path, path)}: "
        opened.unreadable.append(Unreadable(path, f"{inside}{error.reason}"))
        return set()
    opened.snapshots.append(snapshot)
    return {tensor.path for tensor in snapshot.tensors.values()}


def _add_from_folder(path: str, opened: Opened) -> bool:
    """Open a file of a folder if it is a checkpoint by ending or content; return whether it was taken."""
    if os.path.basename(path) in readers.SETTINGS:
        opened.skipped += 1
        return False
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
