"""Find and open the checkpoints under the paths that a user passed."""

from __future__ import annotations

import contextlib
import glob
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck import readers
from syncheck.errors import CheckpointError, NotACheckpoint, UnreadableFile, UsageError
from syncheck.omissions import find_unread_siblings, is_text_state
from syncheck.records import Alias, Unreadable
from syncheck.text import names_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

    from syncheck.snapshots import Snapshot

# A folder to enter, the enclosing folder that is a single checkpoint (or ""), and its reader.
_Folder = tuple[str, str, "ModuleType | None"]


@dataclass
class Opened:
    """Checkpoints found under the given paths.

    roots: the folder in which a checkpoint was found, by its path. skipped: number of files in folders that are not
    checkpoints. aliases: links to folders that were also reached by another path.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)
    roots: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    aliases: list[Alias] = field(default_factory=list)


def open_checkpoints(paths: Sequence[str]) -> Opened:
    """Open every checkpoint under the paths: files, folders, or globs that the shell did not expand.

    A folder in a folder format counts as a single checkpoint, and its files are not opened separately. A path passed by
    the user is reported as unreadable if it cannot be opened. Within a folder, files that are not checkpoints are
    counted and skipped, unless they have a checkpoint's file extension, or a name like the checkpoints beside them.
    Raises UsageError for a glob without a match and a folder without a checkpoint.
    """
    opened = Opened()
    seen: dict[str, bool] = {}  # by absolute path, because a path can be given in several spellings
    for path in _expand_globs(paths):
        before = opened.skipped
        if os.path.isdir(path):
            # Shell completion appends a slash, which would leave an empty name to take the rank from.
            if not _open_folder(path.rstrip("/") or path, opened, seen):
                skipped = opened.skipped - before
                raise UsageError(
                    f"{path}: no checkpoint in this folder ({skipped} other files){_describe_unread(path)}; pass a "
                    "folder with torch.save or safetensors files, or train with --save-per-rank"
                )
        elif _absolute_path(path) not in seen:
            _open_checkpoint(path, opened)
            seen[_absolute_path(path)] = True
    return opened


def _describe_unread(folder: str) -> str:
    """Return the format of a folder or of one of its files, which syncheck does not read, and the next step."""
    try:
        unread = readers.describe_unread(folder)
    except (OSError, UnreadableFile):
        return ""
    return "" if unread is None else f": {unread.title}. To compare it, {unread.next_step}"


def _open_folder(folder: str, opened: Opened, seen: dict[str, bool]) -> bool:
    """Open the checkpoints of a folder and return whether it has any. seen: whether a path is a checkpoint."""
    taken: list[str] = []
    others: list[str] = []
    unreadable = len(opened.unreadable)
    for path, is_whole in _walk(folder, opened):
        absolute = _absolute_path(path)
        if absolute not in seen:
            if is_whole:
                seen |= dict.fromkeys(map(_absolute_path, _open_checkpoint(path, opened)), True)
                seen[absolute] = True
            else:
                seen[absolute] = not path.endswith("/") and _open_folder_file(path, opened)
            if seen[absolute]:
                opened.roots[path] = folder
        (taken if seen[absolute] else others).append(path)
    if taken == [folder]:
        opened.roots.pop(folder, None)  # the user passed this checkpoint itself
    opened.unreadable += find_unread_siblings(folder, taken, others)
    return bool(taken) or len(opened.unreadable) > unreadable


def _absolute_path(path: str) -> str:
    """Return one absolute path for all spellings of a path; $PWD may contain a link to the current folder."""
    try:
        if "/../" in f"{path}/":  # the parent of a linked folder is the parent of the link's target
            above, _, rest = f"{path}/".rpartition("/../")
            path = os.path.join(os.path.realpath(f"{above}/.."), rest)
        path, shell = os.path.abspath(path), os.environ.get("PWD", "")
    except FileNotFoundError:
        raise UsageError(f"{path}: the current folder was removed; change to an existing folder") from None
    if path.startswith(f"{shell}/") and os.path.isabs(shell):
        with contextlib.suppress(OSError):
            if os.path.samefile(shell, "."):
                return os.path.join(os.getcwd(), os.path.relpath(path, shell))
    return path


def unify_paths(paths: Iterable[str]) -> dict[str, str]:
    """Return how to print each path, so that all are relative or all are absolute, without `.` and `..`.

    In a mixture, paths below the current folder are relative to it, and all other paths are absolute.
    """
    paths = list(paths)
    kinds = {os.path.isabs(path) for path in paths}
    if len(kinds) < 2:
        return {path: os.path.normpath(path) for path in paths}
    current = f"{os.getcwd()}/"
    return {
        path: absolute.removeprefix(current) for path, absolute in zip(paths, map(_absolute_path, paths), strict=True)
    }


def _expand_globs(paths: Sequence[str]) -> list[str]:
    found: list[str] = []
    for path in paths:
        if os.path.lexists(path) or not glob.has_magic(path):
            found.append(path)
            continue
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise UsageError(f"{path}: no file matches this pattern. {_describe_folder(path)}")
        found += matches
    return found


def _describe_folder(pattern: str) -> str:
    """Explain a glob without a match: its folder does not exist, or contains other names."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    try:
        names = sorted(name for name in os.listdir(folder or ".") if not name.startswith("."))
    except OSError as error:
        return f"{folder}: {UnreadableFile.because(folder, error).reason}."
    return f"{folder or 'This folder'} contains {names_text(names, 2) or 'nothing'}."


def holds_checkpoint(path: str) -> bool:
    """Whether `open_checkpoints` would find a checkpoint at this path, a file or a folder."""
    if os.path.isdir(path):
        return any(is_whole or _is_checkpoint(found) for found, is_whole in _walk(path, Opened()))
    return _is_checkpoint(path)


def _is_checkpoint(path: str) -> bool:
    if os.path.basename(path) in readers.SETTINGS:
        return False
    try:
        return path.lower().endswith(readers.EXTENSIONS) or readers.is_recognizable(path)
    except UnreadableFile:
        return False


def _walk(folder: str, opened: Opened) -> Iterator[tuple[str, bool]]:
    """Yield the files below a folder in a fixed order, folders with a trailing slash, and whether each is a checkpoint.

    A folder that is a single checkpoint replaces its files. Hidden files and folders are ignored. Links to folders come
    last, and each folder is entered once: a second path to a folder is an alias, and links to a parent are ignored.
    opened: gets the aliases, and the folders that cannot be read.
    """
    visited: dict[tuple[int, int], str] = {}
    with contextlib.suppress(OSError):
        above = Path(folder).resolve().parents
        visited = {(at.st_dev, at.st_ino): "" for at in map(os.stat, above)}
    waiting, links = list[_Folder]([(folder, "", None)]), list[_Folder]()
    while waiting or links:
        current, whole, whole_reader = waiting.pop() if waiting else links.pop(0)
        try:
            at = os.stat(current)
            known = visited.setdefault((at.st_dev, at.st_ino), current)
            if known != current:
                if known:
                    opened.aliases.append(Alias(current, known))
                continue
            with os.scandir(current) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
            reader = readers.sniff_folder(current)
        except (OSError, UnreadableFile) as error:
            wrong = error if isinstance(error, UnreadableFile) else UnreadableFile.because(current, error)
            opened.unreadable.append(Unreadable(current, f"{wrong.reason}: could not list this folder"))
            continue
        if reader is not None:
            whole, whole_reader = current, reader
            yield current, True
        below = list[_Folder]()
        for entry in entries:
            if entry.name.startswith("."):
                continue
            # For a path that exceeds the system's limit, only the directory entry knows whether it is a folder.
            if entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path):
                (links if entry.is_symlink() else below).append((entry.path, whole, whole_reader))
            elif whole_reader is None or not whole_reader.holds(os.path.relpath(entry.path, whole)):
                yield entry.path, False
        if current != folder and reader is None:
            yield f"{current}/", False
        waiting += reversed(below)


def _open_checkpoint(path: str, opened: Opened) -> set[str]:
    """Open a checkpoint and return the files that contain its tensors."""
    try:
        snapshot = readers.read(path)
    except CheckpointError as error:
        prefix = "" if error.path == path else f"{os.path.relpath(error.path, path)}: "
        opened.unreadable.append(Unreadable(path, f"{prefix}{error.reason}"))
        return set()
    opened.snapshots.append(snapshot)
    return {tensor.path for tensor in snapshot.tensors.values()}


def _open_folder_file(path: str, opened: Opened) -> bool:
    """Open a file of a folder if its extension or content is a checkpoint's; return whether it is a checkpoint."""
    if os.path.basename(path) in readers.SETTINGS:
        opened.skipped += 1
        return False
    if path.lower().endswith(readers.EXTENSIONS):
        if is_text_state(path):
            opened.skipped += 1
            return False
        _open_checkpoint(path, opened)
        return True
    try:
        if readers.is_recognizable(path):
            opened.snapshots.append(readers.read(path))
            return True
    except (NotACheckpoint, UnreadableFile):
        pass  # an unrelated zip, a pipe or a dangling link without a checkpoint's extension
    except CheckpointError as error:
        opened.unreadable.append(Unreadable(path, error.reason))
        return True
    opened.skipped += 1
    return False
