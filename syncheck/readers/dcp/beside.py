"""What lies in a torch.distributed.checkpoint folder beside the chunks that `.metadata` names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.readers.assembly import Assembly
from syncheck.readers.files import read_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from syncheck.snapshots import Snapshot

CHUNKS = ".distcp"
# Written by torch.save: what Lightning and Megatron-Core keep apart, such as the step.
EXTRAS = ("meta.pt", "common.pt")


def with_extras(whole: Snapshot) -> Snapshot:
    """Add what the files hold that are no chunks. Raises CheckpointError for one that cannot be read."""
    there = [path for name in EXTRAS if os.path.lexists(path := os.path.join(whole.path, name))]
    if not there:
        return whole
    assembly = Assembly(whole.path, whole.format)
    for part in (whole, *map(read_file, there)):
        assembly.add(part)
    return assembly.snapshot()


def unlisted(folder: str, named: Collection[str]) -> Iterator[str]:
    """Say which files of chunks belong to no tensor: torch does not read them, and so they are not compared.

    named: those in which chunks lie, by their path below the folder.
    """
    found = sorted(name for name in os.listdir(folder) if name.endswith(CHUNKS) and name not in named)
    if found:
        listed = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        yield f"files of chunks that .metadata does not name were not compared ({len(found)}): {listed}"
