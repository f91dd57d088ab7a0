"""Find paths without a comparison of their own: links to other replicas, and files named like checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile
from syncheck.readers.untrusted import open_regular_file
from syncheck.records import Alias, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.layout.groups import Ranked
    from syncheck.snapshots import Snapshot

_DIGITS = re.compile(r"\d+")
_SUFFIX = re.compile(r"(?:\.(?!r(?:ank)?\d)[a-z][a-z0-9]{0,11})+$", re.IGNORECASE)
# Extensions of files beside checkpoints: notes and pictures.
_NOTES = tuple(".log .txt .out .err .csv .tsv .jsonl .md .yaml .yml .toml .html .png .jpg .svg .pdf .py .sh".split())

# Lines of small text files: a number, a comment, or a setting in YAML, with its list items below.
_TEXT_LINE = re.compile(r"\s*(?:[-+]?[\d.]+(?:e[-+]?\d+)?|#.*|[A-Za-z_][\w-]*:(?: +\S+)?|- +\S+)?\s*", re.IGNORECASE)
_MOST_TEXT = 1 << 16


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
