"""Find and open the checkpoints under the paths of a user, and find paths without a comparison of their own."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import CheckpointError, NotACheckpoint, UnreadableFile, UsageError
from syncheck.readers.formats import EXTENSIONS, SETTINGS, is_recognizable
from syncheck.readers.open import describe_unread, read, sniff_folder
from syncheck.readers.opened import NOTES, Opened
from syncheck.readers.torch_zip import keep_last_content
from syncheck.readers.untrusted import open_regular_file
from syncheck.records import Alias, Unreadable
from syncheck.text import names_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import ModuleType


_DIGITS = re.compile(r"\d+")
_SUFFIX = re.compile(r"(?:\.(?!r(?:ank)?\d)[a-z][a-z0-9]{0,11})+$", re.IGNORECASE)
# Lines of small text files: a number, a comment, or a setting in YAML, with its list items below.
_TEXT_LINE = r"(?i)\s*(?:[-+]?[\d.]+(?:e[-+]?\d+)?|#.*|[A-Za-z_][\w-]*:(?: +\S+)?|- +\S+)?\s*"
_MOST_TEXT = 1 << 16


def open_checkpoints(paths: Sequence[str]) -> Opened:
    """Open every checkpoint under the paths: files, folders, or globs that the shell did not expand.

    A folder in a folder format counts as a single checkpoint, and its files are not opened separately. A path passed by
    the user is reported as unreadable if it cannot be opened. Within a folder, files that are not checkpoints are
    counted and skipped, unless they have a checkpoint's file extension, or a name like the checkpoints beside them.
    Raises UsageError for a glob without a match and a folder without a checkpoint.
    """
    opened = Opened()
    with keep_last_content():
        _open_all(paths, opened)
    return opened


def _open_all(paths: Sequence[str], opened: Opened) -> None:
    # By absolute path, because a path can be given in several spellings.
    is_checkpoint: dict[str, bool] = {}
    for path in _expand_globs(paths):
        skipped_before = opened.skipped
        if os.path.isdir(path):
            # Shell completion appends a slash, which would leave an empty name to take the rank from.
            folder = path.rstrip("/") or path
            if not _open_folder(folder, opened, is_checkpoint):
                raise _no_checkpoint_error(path, opened.skipped - skipped_before)
        elif _absolute_path(path) not in is_checkpoint:
            _open_checkpoint(path, opened)
            is_checkpoint[_absolute_path(path)] = True


def _no_checkpoint_error(folder: str, skipped: int) -> UsageError:
    """Return the error for a folder without a checkpoint. skipped: number of files in it."""
    return UsageError(
        f"{folder}: no checkpoint in this folder ({skipped} other files){_explain_missing(folder)}; pass a "
        "folder with torch.save or safetensors files, or train with --save-per-rank"
    )


def _explain_missing(folder: str) -> str:
    """Return the format of a folder or of one of its files, which syncheck does not read, and the next step."""
    try:
        unread = describe_unread(folder)
    except (OSError, UnreadableFile):
        return ""
    return "" if unread is None else f": {unread.title}. To compare it, {unread.next_step}"


def _open_folder(folder: str, opened: Opened, is_checkpoint: dict[str, bool]) -> bool:
    """Open the checkpoints of a folder and return whether it has any.

    is_checkpoint: whether an absolute path is a checkpoint, for all paths that were reached.
    """
    checkpoint_paths: list[str] = []
    remaining_paths: list[str] = []
    # A folder with an unreadable checkpoint is not empty.
    unreadable_before = len(opened.unreadable)
    for path, is_single_checkpoint in _walk(folder, opened):
        absolute = _absolute_path(path)
        if absolute not in is_checkpoint:
            if is_single_checkpoint:
                tensor_paths = _open_checkpoint(path, opened)
                is_checkpoint.update((_absolute_path(tensor_path), True) for tensor_path in tensor_paths)
                is_checkpoint[absolute] = True
            else:
                is_checkpoint[absolute] = not path.endswith("/") and _open_folder_file(path, opened)
            if is_checkpoint[absolute]:
                opened.roots[path] = folder
        if is_checkpoint[absolute]:
            checkpoint_paths.append(path)
        else:
            remaining_paths.append(path)

    if checkpoint_paths == [folder]:
        # The user passed this checkpoint itself.
        opened.roots.pop(folder, None)
    opened.unreadable += find_unread_siblings(folder, checkpoint_paths, remaining_paths)
    has_unreadable = len(opened.unreadable) > unreadable_before
    return has_unreadable or bool(checkpoint_paths)


def _absolute_path(path: str) -> str:
    """Return one absolute path for all spellings of a path; $PWD may contain a link to the current folder."""
    try:
        absolute = os.path.abspath(_resolve_parents(path))
    except FileNotFoundError:
        raise UsageError(f"{path}: the current folder was removed; change to an existing folder") from None

    shell_folder = os.environ.get("PWD", "")
    if not absolute.startswith(f"{shell_folder}/") or not os.path.isabs(shell_folder):
        return absolute

    with contextlib.suppress(OSError):
        if os.path.samefile(shell_folder, "."):
            return os.path.join(os.getcwd(), os.path.relpath(absolute, shell_folder))
    return absolute


def _resolve_parents(path: str) -> str:
    """Return a path without `..`: the parent of a linked folder is the parent of the link's target."""
    if "/../" not in f"{path}/":
        return path
    above, _, below = f"{path}/".rpartition("/../")
    return os.path.join(os.path.realpath(f"{above}/.."), below)


def unify_paths(paths: Iterable[str]) -> dict[str, str]:
    """Return how to print each path, so that all are relative or all are absolute, without `.` and `..`.

    In a mixture, paths below the current folder are relative to it, and all other paths are absolute.
    """
    paths = list(paths)
    kinds = {os.path.isabs(path) for path in paths}
    if len(kinds) < 2:
        return {path: os.path.normpath(path) for path in paths}

    current = f"{os.getcwd()}/"
    return {path: _absolute_path(path).removeprefix(current) for path in paths}


def _expand_globs(paths: Sequence[str]) -> list[str]:
    expanded: list[str] = []
    for path in paths:
        if os.path.lexists(path) or not glob.has_magic(path):
            expanded.append(path)
            continue
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise UsageError(f"{path}: no file matches this pattern. {_describe_folder(path)}")
        expanded += matches
    return expanded


def _describe_folder(pattern: str) -> str:
    """Explain a glob without a match: its folder does not exist, or contains other names."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)

    try:
        names = os.listdir(folder or ".")
    except OSError as error:
        return f"{folder}: {UnreadableFile.because(folder, error).reason}."

    visible_names = sorted(name for name in names if not name.startswith("."))
    title = folder or "This folder"
    content = names_text(visible_names, 2) or "nothing"
    return f"{title} contains {content}."


def holds_checkpoint(path: str) -> bool:
    """Whether `open_checkpoints` would find a checkpoint at this path, a file or a folder."""
    if not os.path.isdir(path):
        return _is_checkpoint(path)
    # Only the paths matter here, not what cannot be opened.
    paths_below = _walk(path, Opened())
    return any(is_single_checkpoint or _is_checkpoint(path_below) for path_below, is_single_checkpoint in paths_below)


def _is_checkpoint(path: str) -> bool:
    if os.path.basename(path) in SETTINGS:
        return False
    if path.lower().endswith(EXTENSIONS):
        return True

    try:
        return is_recognizable(path)
    except UnreadableFile:
        return False


class _Folder(NamedTuple):
    """A folder to enter."""

    path: str
    checkpoint_folder: str = ""
    """The enclosing folder that is a single checkpoint, or this folder; empty without one."""
    reader: ModuleType | None = None
    """The reader of `checkpoint_folder`."""

    def holds(self, path: str) -> bool:
        """Whether a file belongs to the enclosing checkpoint."""
        if self.reader is None:
            return False
        belongs: bool = self.reader.holds(os.path.relpath(path, self.checkpoint_folder))
        return belongs


def _walk(folder: str, opened: Opened) -> Iterator[tuple[str, bool]]:
    """Yield the files below a folder in a fixed order, folders with a trailing slash, and whether each is a checkpoint.

    A folder that is a single checkpoint replaces its files. Hidden files and folders are ignored. Links to folders come
    last, and each folder is entered once: a second path to a folder is an alias, and links to a parent are ignored.
    opened: gets the aliases, and the folders that cannot be read.
    """
    visited = _visit_parents(folder)
    waiting = [_Folder(folder)]
    links: list[_Folder] = []
    while waiting or links:
        current = waiting.pop() if waiting else links.pop(0)
        try:
            if not _visit(current.path, visited, opened):
                continue
            entries = _list_visible(current.path)
            reader = sniff_folder(current.path)
        except (OSError, UnreadableFile) as error:
            opened.unreadable.append(_report_unlisted(current.path, error))
            continue
        if reader is not None:
            current = _Folder(current.path, current.path, reader)
            yield current.path, True
        subfolders: list[_Folder] = []
        for entry in entries:
            if _is_folder(entry):
                target = links if entry.is_symlink() else subfolders
                target.append(current._replace(path=entry.path))
            elif not current.holds(entry.path):
                yield entry.path, False
        if current.path != folder and reader is None:
            yield f"{current.path}/", False
        # The last of the waiting folders is next, so that folders are entered in the order of names.
        waiting += reversed(subfolders)


def _visit_parents(folder: str) -> dict[tuple[int, int], str]:
    """Return the identifiers of the folders above a folder, which have no path of their own."""
    try:
        statuses = [os.stat(parent) for parent in Path(folder).resolve().parents]
    except OSError:
        return {}
    return {(status.st_dev, status.st_ino): "" for status in statuses}


def _visit(folder: str, visited: dict[tuple[int, int], str], opened: Opened) -> bool:
    """Note that a folder is visited, and return whether this is the first visit. Raises OSError."""
    status = os.stat(folder)
    first_path = visited.setdefault((status.st_dev, status.st_ino), folder)
    if first_path == folder:
        return True

    if first_path:
        opened.aliases.append(Alias(folder, first_path))
    return False


def _list_visible(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name, except for hidden ones. Raises OSError."""
    with os.scandir(folder) as scanned:
        entries = [entry for entry in scanned if not entry.name.startswith(".")]
    entries.sort(key=_entry_name)
    return entries


def _entry_name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether a directory entry is a folder or a link to a folder."""
    # For a path that exceeds the system's limit, only the directory entry knows whether it is a folder.
    return entry.is_dir(follow_symlinks=False) or os.path.isdir(entry.path)


def _report_unlisted(folder: str, error: OSError | UnreadableFile) -> Unreadable:
    """Return the record of a folder that cannot be listed."""
    if isinstance(error, OSError):
        error = UnreadableFile.because(folder, error)
    return Unreadable(folder, f"{error.reason}: could not list this folder")


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
        opened.skip(path)
        return False
    if path.lower().endswith(EXTENSIONS):
        if is_text_state(path):
            opened.skip(path)
            return False
        _open_checkpoint(path, opened)
        return True

    try:
        if is_recognizable(path):
            opened.snapshots.append(read(path))
            return True
    except (NotACheckpoint, UnreadableFile):
        # An unrelated zip, a pipe or a dangling link without a checkpoint's extension.
        pass
    except CheckpointError as error:
        opened.unreadable.append(Unreadable(path, error.reason))
        return True

    opened.skip(path)
    return False


class _NumberedNames:
    """Names of checkpoints, to find names that differ only in the numbers."""

    def __init__(self) -> None:
        self._paths: dict[str, dict[tuple[str, ...], str]] = {}

    def add(self, name: str, path: str) -> None:
        """Add a name of the checkpoint at a path."""
        paths_by_numbers = self._paths.setdefault(_DIGITS.sub("*", name), {})
        paths_by_numbers.setdefault(tuple(_DIGITS.findall(name)), path)

    def find_sibling(self, name: str) -> str | None:
        """Return the path of a checkpoint with the same name and other numbers.

        None if there is no such checkpoint, or one with the same numbers.
        """
        numbers = tuple(_DIGITS.findall(name))
        paths_by_numbers = self._paths.get(_DIGITS.sub("*", name), {})
        if not numbers or numbers in paths_by_numbers:
            return None
        return next(iter(paths_by_numbers.values()), None)


def find_unread_siblings(
    folder: str, checkpoint_paths: Sequence[str], remaining_paths: Sequence[str]
) -> Iterator[Unreadable]:
    """Yield files and folders without a checkpoint whose names differ from a checkpoint's only in the numbers.

    Examples beside rank_0 and rank_2: an empty rank_1, rank_1.npz, a folder rank_1/ without a checkpoint. A file with
    the same numbers belongs to its checkpoint, for example rank_0.json to rank_0.pth, and is not reported.
    remaining_paths: of all other files, and of folders, with a slash at their end.
    """
    names = _NumberedNames()
    for path in checkpoint_paths:
        for name in _list_checkpoint_names(os.path.relpath(path, folder)):
            names.add(name, path)

    for path in remaining_paths:
        for name in _list_possible_names(os.path.relpath(path, folder), is_folder=path.endswith("/")):
            sibling = names.find_sibling(name)
            if sibling is not None:
                yield _report_sibling(path, os.path.relpath(sibling, folder))
                break


def _list_checkpoint_names(relative: str) -> list[str]:
    """Return the names of a checkpoint: its path and file name without extension, and the folders above it."""
    stem = _SUFFIX.sub("", relative)
    segments = stem.split("/")
    folders = ["/".join(segments[:depth]) + "/" for depth in range(1, len(segments))]
    return [stem, os.path.basename(stem), *folders]


def _list_possible_names(relative: str, *, is_folder: bool) -> set[str]:
    """Return the names by which a file or folder may be like a checkpoint; none for notes and pictures."""
    if is_folder:
        return {f"{relative}/"}
    if relative.lower().endswith(NOTES):
        return set()

    stem = _SUFFIX.sub("", relative)
    name = os.path.basename(stem)
    # A name of digits only may be anything in another folder.
    has_letters = re.search("[a-z]", name, re.IGNORECASE) is not None
    return {stem, name} if has_letters else {stem}


def _report_sibling(path: str, sibling: str) -> Unreadable:
    """Return the record of a file or folder that is named like a checkpoint. sibling: the path of the checkpoint."""
    problem = "holds no checkpoint" if path.endswith("/") else "not a checkpoint"
    return Unreadable(path.rstrip("/"), f"{problem}, but named like {sibling}; save it again, or remove it")


def is_text_state(path: str) -> bool:
    """Whether a file holds numbers or settings as text, as SpeechBrain's counter.ckpt and brain.ckpt do.

    Other texts stand in for a checkpoint that is absent, for example a pointer of Git LFS or an error page.
    """
    try:
        with open_regular_file(path) as file:
            data = file.read(_MOST_TEXT + 1)
        text = data.decode("ascii")
    except (OSError, ValueError, UnreadableFile):
        return False

    if len(data) > _MOST_TEXT or not data.strip():
        return False
    return all(re.fullmatch(_TEXT_LINE, line) for line in text.splitlines())
