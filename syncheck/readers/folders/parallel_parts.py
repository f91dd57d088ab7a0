"""Checkpoints that model-parallel and ZeRO ranks write in parts: each file holds what no other does."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, brief
from syncheck.messages import Note
from syncheck.readers.assembly import Assembly
from syncheck.readers.files import read_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from syncheck.messages import Message
    from syncheck.snapshots import Snapshot

    Part: TypeAlias = tuple[str, str, bool]

# What helpers beside the model are known by: it stays in front, so that what a tensor is can be told from its name.
_TOPS = ("optimizer", "scaler")
# Names under which trainers keep the progress of a run.
_PROGRESS = frozenset({"step", "epoch", "global_step", "global_steps", "iteration", "iter", "epochs_run", "steps_run"})


def read_parts(folder: str, format_name: str, parts: Sequence[Part]) -> Snapshot:
    """Open a checkpoint in parts.

    parts: of each file its path, a label that tells it from the others (empty where there is one), and whether all in
    it is of the optimizer. Labels stand in front of the names, after `optimizer`. Values that all files have alike,
    such as the iteration, keep their name. Raises CheckpointError for a file that cannot be read, and for one that was
    written at another moment of the run.
    """
    whole = Assembly(folder, format_name)
    opened = [read_file(path) for path, _, _ in parts]
    _check_progress(opened, folder)
    for part, (_, label, optimizer) in zip(opened, parts, strict=True):
        whole.add(part, _labelled(label, optimizer=optimizer))
    whole.values |= _shared(opened)
    return whole.snapshot()


def label(match: re.Match[str], found: Sequence[re.Match[str]]) -> str:
    """Return what tells a file from the others found of its kind: nothing for the first part where it is the only one.

    Another part that stands alone is not the first one, whatever it holds. match: of which `label` is the name.
    """
    first = not any(int(number) for number in re.findall(r"\d+", match["label"]))
    return "" if first and len(found) == 1 else match["label"]


def lacking(places: Iterable[tuple[int, ...]], what: str) -> list[Message]:
    """Return a note if a folder lacks parts. places: the numbers of each part."""
    there = set(places)
    if len({len(place) for place in there}) != 1:  # no grid
        return []
    most = math.prod(max(column) + 1 for column in zip(*there, strict=True))
    gone = most - len(there)
    return [Note.PARTS_ABSENT(absent=brief(gone), total=brief(most), what=what)] if gone else []


def _check_progress(opened: Sequence[Snapshot], folder: str) -> None:
    """Raise MalformedFile where parts say of different steps that they are of them: no checkpoint has such."""
    first: dict[str, Snapshot] = {}
    for part in opened:
        for name in _PROGRESS.intersection(part.values):
            other = first.setdefault(name, part)
            if part.values[name] != other.values[name]:
                raise MalformedFile(
                    part.path,
                    place=name,
                    found=brief(part.values[name]),
                    needed=f"{brief(other.values[name])}, as {os.path.relpath(other.path, folder)} has",
                    next_step="it is of another step than the rest: save or copy the whole folder again",
                )


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
