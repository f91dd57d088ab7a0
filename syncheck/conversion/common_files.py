"""Find the common files of both sides of a difference: a file is always equal to itself, which proves no copy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.messages import Note, note_if

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message


def note_common_files(sides: Sequence[Side]) -> list[Message]:
    """Return a note about the common files of A and B, also by links and other spellings of a path."""
    side_a, side_b = sides
    files_a, files_b = _identify_files(side_a), _identify_files(side_b)
    common_paths = [path for file, path in files_a.items() if file in files_b]
    return note_if(common_paths, Note.SAME_FILES(files=tuple(common_paths)))


def _identify_files(side: Side) -> dict[tuple[int, int], str]:
    """Return the paths of the files with the tensors of a side, by device and number of the file."""
    paths: set[str] = set()
    for _, snapshot in side.group.ranks:
        # An object in memory has no files.
        if snapshot.format != "memory":
            paths.update(tensor.path for tensor in snapshot.tensors.values())

    files: dict[tuple[int, int], str] = {}
    for path in sorted(paths):
        status = os.stat(path)
        files[status.st_dev, status.st_ino] = path

    return files
