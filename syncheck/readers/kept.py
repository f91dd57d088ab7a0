"""What is not to be written over: a report in the place of a checkpoint would be the end of the checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile, UsageError
from syncheck.readers.files import sniff

if TYPE_CHECKING:
    from types import ModuleType


def keep(path: str, option: str = "-o", *, but: ModuleType | None = None) -> None:
    """Raise UsageError, naming the option, where a checkpoint lies, or a file of a folder that is one.

    but: the reader of a format that may be replaced.
    """
    if os.path.isfile(path) and _is_part(path, but):
        raise UsageError(f"{option} {path}: a checkpoint lies there, and it would be lost; name another file")


def _is_part(path: str, but: ModuleType | None) -> bool:
    from syncheck.readers import folders  # where something is written over only

    try:
        if sniff(path) not in (None, but):
            return True
        # An index or a list of settings is no checkpoint by itself.
        folder, name = os.path.split(os.path.realpath(path))
        whole = folders.sniff_folder(folder)
    except UnreadableFile:
        return False
    return whole is not None and bool(whole.holds(name))
