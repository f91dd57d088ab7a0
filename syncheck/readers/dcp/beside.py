"""What lies in a torch.distributed.checkpoint folder beside the chunks that `.metadata` names."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.names import free_name
from syncheck.readers.files import read_file

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from syncheck.snapshots import Snapshot, Tensor

CHUNKS = ".distcp"
# Written by torch.save: what Lightning and Megatron-Core keep apart, such as the step.
EXTRAS = ("meta.pt", "common.pt")


def with_extras(whole: Snapshot) -> Snapshot:
    """Add what the files hold that are no chunks. Raises CheckpointError for one that cannot be read."""
    for path in (os.path.join(whole.path, name) for name in EXTRAS):
        if os.path.lexists(path):
            whole = _with(whole, read_file(path))
    return whole


def _with(whole: Snapshot, extra: Snapshot) -> Snapshot:
    """Add a file. Of two things of one name both are kept, that of the file as `name#2`."""
    tensors: dict[str, Tensor] = dict(whole.tensors)
    for name, tensor in extra.tensors.items():
        free = free_name(name, tensors)
        tensors[free] = replace(tensor, name=free)
    values: dict[str, Any] = dict(whole.values)
    for name, value in extra.values.items():
        if name not in values or values[name] != value:
            values[free_name(name, values)] = value
    return replace(
        whole,
        bytes=whole.bytes + extra.bytes,
        tensors=tensors,
        values=values,
        stubs=tuple(sorted({*whole.stubs, *extra.stubs})),
        metadata=whole.metadata or extra.metadata,
    )


def unlisted(folder: str, named: Collection[str]) -> Iterator[str]:
    """Say which files of chunks belong to no tensor: torch does not read them, and so they are not compared.

    named: those in which chunks lie, by their path below the folder.
    """
    found = sorted(name for name in os.listdir(folder) if name.endswith(CHUNKS) and name not in named)
    if found:
        listed = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
        yield f"files of chunks that .metadata does not name were not compared ({len(found)}): {listed}"
