"""Prevent output files from overwriting checkpoints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.errors import UnreadableFile, UsageError
from syncheck.readers.files import sniff, sniff_folder

if TYPE_CHECKING:
    from types import ModuleType


def refuse_overwrite(path: str, option: str = "-o", *, replaceable: ModuleType | None = None) -> None:
    """Raise UsageError, with the option's name, if the output path is a checkpoint or belongs to a checkpoint.

    replaceable: the reader of a format that may be overwritten.
    """
    if os.path.isfile(path) and _is_part(path, replaceable):
        raise UsageError(f"{option} {path}: would overwrite a checkpoint; pass another path")


def _is_part(path: str, replaceable: ModuleType | None) -> bool:
    try:
        if sniff(path) not in (None, replaceable):
            return True
        # An index or a list of settings is not a checkpoint by itself.
        folder, name = os.path.split(os.path.realpath(path))
        folder_format = sniff_folder(folder)
    except UnreadableFile:
        return False
    return folder_format is not None and bool(folder_format.holds(name))
