"""Checkpoints that model-parallel and ZeRO ranks write in parts: each file holds what no other does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.readers.files import read_file
from syncheck.readers.folders.assembly import Assembly

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from syncheck.snapshots import Snapshot

    Part: TypeAlias = tuple[str, str, bool]

# What helpers beside the model are known by: it stays in front, so that what a tensor is can be told from its name.
_TOPS = ("optimizer", "scaler")


def read_parts(folder: str, format_name: str, parts: Sequence[Part]) -> Snapshot:
    """Open a checkpoint in parts.

    parts: of each file its path, a label that tells it from the others (empty where there is one), and whether all in
    it is of the optimizer. Labels stand in front of the names, after `optimizer`. Values that all files have alike,
    such as the iteration, keep their name. Raises CheckpointError for a file that cannot be read.
    """
    whole = Assembly(folder, format_name)
    opened = [read_file(path) for path, _, _ in parts]
    for part, (_, label, optimizer) in zip(opened, parts, strict=True):
        whole.add(part, _labelled(label, optimizer=optimizer))
    whole.values |= _shared(opened)
    return whole.snapshot()


def _labelled(label: str, *, optimizer: bool) -> Callable[[str], str]:
    def rename(name: str) -> str:
        top, dot, inner = name.partition(".")
        if optimizer:
            inner = inner if dot and top in ("optimizer", "optimizer_state_dict") else name
            return ".".join(filter(None, ("optimizer", label, inner)))
        if not label:
            return name
        return f"{top}.{label}.{inner}" if dot and top in _TOPS else f"{label}.{name}"

    return rename


def _shared(opened: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the values at the top of all files that hold them, where these agree: the iteration, the version."""
    first = {name: value for part in reversed(opened) for name, value in part.values.items() if "." not in name}
    return {
        name: value
        for name, value in first.items()
        if all(part.values[name] == value for part in opened if name in part.values)
    }
