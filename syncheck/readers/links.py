"""Files reached by several paths: each is compared once, and never with itself."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from syncheck.records import Alias, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.layout.groups import Ranked
    from syncheck.snapshots import Snapshot


def remove_aliases(snapshots: Sequence[Snapshot]) -> tuple[list[Snapshot], list[Alias]]:
    """Keep one path of each checkpoint, and return the other paths to the same files as aliases.

    Symbolic links, hard links and links to folders count equally.
    """
    remaining_paths: set[str] = set()
    aliases: list[Alias] = []
    path_by_files: dict[frozenset[tuple[int, int]], str] = {}
    # Links come last, so the remaining path is the file itself.
    for snapshot in sorted(snapshots, key=_is_link):
        files = _list_file_ids(snapshot)
        if files and files in path_by_files:
            aliases.append(Alias(snapshot.path, path_by_files[files]))
        else:
            path_by_files[files] = snapshot.path
            remaining_paths.add(snapshot.path)
    return [snapshot for snapshot in snapshots if snapshot.path in remaining_paths], aliases


def _is_link(snapshot: Snapshot) -> bool:
    return os.path.islink(snapshot.path)


def find_shared_files(ranks: Ranked) -> Iterator[Unreadable]:
    """Yield the replicas of a group that share some of their files with another replica, by links.

    A shared file equals itself, so the comparison may be out of sync but never in sync.
    """
    if len(ranks) < 2:
        return

    owners: dict[tuple[int, int], str] = {}
    for _, snapshot in ranks:
        files = _list_file_ids(snapshot)
        owners_of_shared = [owners[file] for file in files if file in owners]
        if owners_of_shared:
            count = len(owners_of_shared)
            yield Unreadable(
                snapshot.path,
                f"{count} of its {len(files)} files are links to files of {owners_of_shared[0]} and were compared "
                "with themselves; copy them instead",
            )
        owners |= dict.fromkeys(files, snapshot.path)


def _list_file_ids(snapshot: Snapshot) -> frozenset[tuple[int, int]]:
    """Return device and inode of each file with tensors, or of the checkpoint's path if no tensor is in a file."""
    statuses = [tensor.opened for tensor in snapshot.tensors.values() if tensor.opened is not None]
    if not statuses:
        with contextlib.suppress(OSError):
            statuses = [os.stat(snapshot.path)]
    # The inode is 0 on file systems without inode numbers.
    return frozenset((status.st_dev, status.st_ino) for status in statuses if status.st_ino)
