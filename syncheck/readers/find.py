"""Find and open the checkpoints under the paths of a user, and find paths without a comparison of their own."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from syncheck.errors import CheckpointError, NotACheckpoint, UnreadableFile, UsageError
from syncheck.readers.formats import EXTENSIONS, SETTINGS, is_recognizable
from syncheck.readers.open import describe_unread, read, sniff_folder
from syncheck.readers.untrusted import open_regular_file
from syncheck.records import Alias, Unreadable
from syncheck.text import names_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType

    from syncheck.layout.groups import Ranked
    from syncheck.snapshots import Snapshot

_DIGITS = re.compile(r"\d+")
_SUFFIX = re.compile(r"(?:\.(?!r(?:ank)?\d)[a-z][a-z0-9]{0,11})+$", re.IGNORECASE)
# Extensions of files beside checkpoints: notes and pictures.
_NOTES = tuple(".log .txt .out .err .csv .tsv .jsonl .md .yaml .yml .toml .html .png .jpg .svg .pdf .py .sh".split())
# Lines of small text files: a number, a comment, or a setting in YAML, with its list items below.
_TEXT_LINE = re.compile(r"\s*(?:[-+]?[\d.]+(?:e[-+]?\d+)?|#.*|[A-Za-z_][\w-]*:(?: +\S+)?|- +\S+)?\s*", re.IGNORECASE)
_MOST_TEXT = 1 << 16

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
                    f"{path}: no checkpoint in this folder ({skipped} other files){_explain_missing(path)}; pass a "
                    "folder with torch.save or safetensors files, or train with --save-per-rank"
                )
        elif _absolute_path(path) not in seen:
            _open_checkpoint(path, opened)
            seen[_absolute_path(path)] = True
    return opened


def _explain_missing(folder: str) -> str:
    """Return the format of a folder or of one of its files, which syncheck does not read, and the next step."""
    try:
        unread = describe_unread(folder)
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
    if os.path.basename(path) in SETTINGS:
        return False
    try:
        return path.lower().endswith(EXTENSIONS) or is_recognizable(path)
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
            reader = sniff_folder(current)
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
        snapshot = read(path)
    except CheckpointError as error:
        prefix = "" if error.path == path else f"{os.path.relpath(error.path, path)}: "
        opened.unreadable.append(Unreadable(path, f"{prefix}{error.reason}"))
        return set()
    opened.snapshots.append(snapshot)
    return {tensor.path for tensor in snapshot.tensors.values()}


def _open_folder_file(path: str, opened: Opened) -> bool:
    """Open a file of a folder if its extension or content is a checkpoint's; return whether it is a checkpoint."""
    if os.path.basename(path) in SETTINGS:
        opened.skipped += 1
        return False
    if path.lower().endswith(EXTENSIONS):
        if is_text_state(path):
            opened.skipped += 1
            return False
        _open_checkpoint(path, opened)
        return True
    try:
        if is_recognizable(path):
            opened.snapshots.append(read(path))
            return True
    except (NotACheckpoint, UnreadableFile):
        pass  # an unrelated zip, a pipe or a dangling link without a checkpoint's extension
    except CheckpointError as error:
        opened.unreadable.append(Unreadable(path, error.reason))
        return True
    opened.skipped += 1
    return False


def find_unread_siblings(folder: str, taken: Sequence[str], others: Sequence[str]) -> Iterator[Unreadable]:
    """Yield files and folders without a checkpoint whose names differ from a checkpoint's only in the numbers.

    Examples beside rank_0 and rank_2: an empty rank_1, rank_1.npz, a folder rank_1/ without a checkpoint. A file with
    the same numbers belongs to its checkpoint, such as rank_0.json to rank_0.pth, and is not reported.
    taken: paths of the checkpoints. others: paths of all other files, and of folders, with a slash at their end.
    """
    known: dict[str, dict[tuple[str, ...], str]] = {}

    def add_name(key: str, path: str) -> None:
        known.setdefault(_DIGITS.sub("*", key), {}).setdefault(tuple(_DIGITS.findall(key)), path)

    for path in taken:
        stem = _SUFFIX.sub("", os.path.relpath(path, folder))
        add_name(stem, path)
        add_name(os.path.basename(stem), path)
        parts = stem.split("/")
        for depth in range(1, len(parts)):
            add_name("/".join(parts[:depth]) + "/", path)
    for path in others:
        relative = os.path.relpath(path, folder)
        if path.endswith("/"):
            keys = {f"{relative}/"}
        elif relative.lower().endswith(_NOTES):
            continue
        else:
            stem = _SUFFIX.sub("", relative)
            name = os.path.basename(stem)
            # A name of digits only may be anything in another folder.
            keys = {stem, name} if re.search("[a-z]", name, re.IGNORECASE) else {stem}
        for key in keys:
            alike, numbers = known.get(_DIGITS.sub("*", key), {}), tuple(_DIGITS.findall(key))
            if numbers and alike and numbers not in alike:
                what = "holds no checkpoint" if path.endswith("/") else "not a checkpoint"
                like = os.path.relpath(next(iter(alike.values())), folder)
                yield Unreadable(path.rstrip("/"), f"{what}, but named like {like}; save it again, or remove it")
                break


def is_text_state(path: str) -> bool:
    """Whether a file holds numbers or settings as text, as SpeechBrain's counter.ckpt and brain.ckpt do.

    Other texts stand in for a checkpoint that is absent, such as a pointer of Git LFS or an error page.
    """
    try:
        with open_regular_file(path) as file:
            data = file.read(_MOST_TEXT + 1)
    except (OSError, ValueError, UnreadableFile):
        return False
    if not data.strip() or len(data) > _MOST_TEXT:
        return False
    try:
        lines = data.decode("ascii").splitlines()
    except UnicodeDecodeError:
        return False
    return all(_TEXT_LINE.fullmatch(line) for line in lines)


def remove_aliases(snapshots: Sequence[Snapshot]) -> tuple[list[Snapshot], list[Alias]]:
    """Keep one path of each checkpoint, and return the other paths to the same files as aliases.

    Symbolic links, hard links and links to folders count equally.
    """
    kept: dict[str, Snapshot] = {}
    aliases: list[Alias] = []
    by_files: dict[frozenset[tuple[int, int]], str] = {}
    # Links come last, so the kept path is the file itself.
    for snapshot in sorted(snapshots, key=lambda s: os.path.islink(s.path)):
        files = _list_file_ids(snapshot)
        if files and files in by_files:
            aliases.append(Alias(snapshot.path, by_files[files]))
        else:
            by_files[files] = snapshot.path
            kept[snapshot.path] = snapshot
    return [snapshot for snapshot in snapshots if snapshot.path in kept], aliases


def find_shared_files(ranks: Ranked) -> Iterator[Unreadable]:
    """Yield the replicas of a group that share some of their files with another replica, by links.

    A shared file equals itself, so the comparison may be out of sync but never in sync.
    """
    taken: dict[tuple[int, int], str] = {}
    for _, snapshot in ranks if len(ranks) > 1 else ():
        files = _list_file_ids(snapshot)
        known = [taken[file] for file in files if file in taken]
        if known:
            found = f"{len(known)} of its {len(files)} files are links to files of {known[0]}"
            yield Unreadable(snapshot.path, f"{found} and were compared with themselves; copy them instead")
        taken |= dict.fromkeys(files, snapshot.path)


def _list_file_ids(snapshot: Snapshot) -> frozenset[tuple[int, int]]:
    """Return device and inode of each file with tensors, or of the checkpoint's path if no tensor is in a file."""
    found = {(t.opened.st_dev, t.opened.st_ino) for t in snapshot.tensors.values() if t.opened is not None}
    if not found:
        with contextlib.suppress(OSError):
            at = os.stat(snapshot.path)
            found = {(at.st_dev, at.st_ino)}
    return frozenset((device, inode) for device, inode in found if inode)  # 0 on file systems without inode numbers
