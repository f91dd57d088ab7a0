"""Readers of checkpoint formats, one file each. The content of a file selects its reader, never the file extension.

A checkpoint is a file (table `READERS` in files.py) or a folder of related files (table `FOLDERS` in folders/).
"""

from __future__ import annotations

from syncheck.readers.files import (
    EXTENSIONS,
    READERS,
    SETTINGS,
    describe_unread,
    find_reader,
    is_in_checkpoint,
    is_recognizable,
    read,
    read_head,
    sniff,
    sniff_folder,
)

__all__ = [
    "EXTENSIONS",
    "READERS",
    "SETTINGS",
    "describe_unread",
    "find_reader",
    "is_in_checkpoint",
    "is_recognizable",
    "read",
    "read_head",
    "sniff",
    "sniff_folder",
]
