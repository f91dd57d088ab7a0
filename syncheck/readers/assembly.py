"""List the files of a folder, and combine them into one checkpoint."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.messages import Note
from syncheck.readers.formats import read_file
from syncheck.snapshots import Metadata, Snapshot, Tensor
from syncheck.text import brief, make_unique_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from syncheck.messages import Message
    from syncheck.snapshots import Membership

# Top-level keys that stay before the label, because they determine the kinds of tensors.
_TOPS = ("optimizer", "scaler")
# Names of a run's progress.
_PROGRESS = frozenset({"step", "epoch", "global_step", "global_steps", "iteration", "iter", "epochs_run", "steps_run"})


def match_in_order(pattern: re.Pattern[str], names: Iterable[str]) -> list[re.Match[str]]:
    """Return the matching names in numeric order: part 10 comes after part 9."""
    found = [match for name in sorted(names) if (match := pattern.fullmatch(name))]
    return sorted(found, key=lambda m: [int(part) for part in re.findall(r"\d+", m.string)])


@dataclass
class Assembly:
    """A checkpoint made of several files. folder: its path. format: of the whole folder."""

    folder: str
    format: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    model_values: dict[str, Membership] = field(default_factory=dict)
    stubs: set[str] = field(default_factory=set)
    bytes: int = 0
    metadata: Metadata | None = None
    notes: list[Message] = field(default_factory=list)

    def add(self, part: Snapshot, rename: Callable[[str], str] = str) -> None:
        """Add the content of a file. If two tensors get the same name, the second becomes `name#2`.

        The same holds for values, unless they are equal: every safetensors shard stores `format = 'pt'`.
        """
        for name, tensor in part.tensors.items():
            free = make_unique_name(rename(name), self.tensors)
            self.tensors[free] = tensor if free == tensor.name else replace(tensor, name=free)
        for name, value in part.values.items():
            full = rename(name)
            known = self.values.get(full)
            if full not in self.values or type(known) is not type(value) or known != value:
                full = make_unique_name(full, self.values)
                self.values[full] = value
            if name in part.model_values:
                self.model_values[full] = part.model_values[name]
        self.stubs |= set(part.stubs)
        self.bytes += part.bytes
        self._check_run(part)
        self.metadata = self.metadata or part.metadata
        self.notes += [note for note in part.notes if note not in self.notes]

    def _check_run(self, part: Snapshot) -> None:
        """Raise MalformedFile if the metadata blocks of two files have different runs or steps."""
        for what in ("run_id", "step"):
            known, own = getattr(self.metadata, what, None), getattr(part.metadata, what, None)
            if None not in (known, own) and known != own:
                raise MalformedFile(
                    part.path, place=f"metadata, {what}", found=brief(own),
                    needed=f"{brief(known)}, as in the other files",
                    next_step="its run or step differs from the other files: save or copy the whole folder again",
                )  # fmt: skip

    def snapshot(self) -> Snapshot:
        """Return the combined checkpoint."""
        stubs = tuple(sorted(self.stubs))
        notes = tuple(self.notes)
        return Snapshot(
            self.folder, self.format, self.bytes, self.tensors, self.values, stubs, self.metadata, notes,
            model_values=self.model_values,
        )  # fmt: skip


def read_parts(folder: str, format_name: str, parts: Sequence[tuple[str, str, bool]]) -> Assembly:
    """Open a checkpoint in which each file of a model-parallel or ZeRO rank contains a different part.

    parts: for each file, its path, a label that distinguishes it (empty for a single file), and whether all of it is
    optimizer state. Labels precede the names in a file, but follow `optimizer`. Values that are equal in all files,
    such as the iteration, get no label. Raises CheckpointError for an unreadable file, or a file of another step.
    """
    whole = Assembly(folder, format_name)
    opened = [read_file(path) for path, _, _ in parts]
    _check_progress(opened, folder)
    for part, (_, label, optimizer) in zip(opened, parts, strict=True):
        whole.add(part, _make_rename(label, optimizer=optimizer))
    whole.values |= _find_shared_values(opened)
    return whole


def choose_label(match: re.Match[str], found: Sequence[re.Match[str]]) -> str:
    """Return the label of a file. It is empty for part 0 if no other part is present.

    A single part other than 0 keeps its label, because the folder is incomplete. match: with a group `label`.
    """
    first = not any(int(number) for number in re.findall(r"\d+", match["label"]))
    return "" if first and len(found) == 1 else match["label"]


def note_missing_parts(part_numbers: Iterable[tuple[int, ...]], what: str) -> list[Message]:
    """Return a note if a folder lacks parts. part_numbers: the numbers in each part's name."""
    present = set(part_numbers)
    if len({len(place) for place in present}) != 1:  # names with different counts of numbers form no grid
        return []
    most = math.prod(max(column) + 1 for column in zip(*present, strict=True))
    missing = most - len(present)
    return [Note.PARTS_ABSENT(absent=brief(missing), total=brief(most), what=what)] if missing else []


def _check_progress(opened: Sequence[Snapshot], folder: str) -> None:
    """Raise MalformedFile if parts have different steps, which no consistent checkpoint has."""
    first: dict[str, Snapshot] = {}
    for part in opened:
        for name in _PROGRESS.intersection(part.values):
            other = first.setdefault(name, part)
            if part.values[name] != other.values[name]:
                raise MalformedFile(
                    part.path,
                    place=name,
                    found=brief(part.values[name]),
                    needed=f"{brief(other.values[name])}, as in {os.path.relpath(other.path, folder)}",
                    next_step="its step differs from the other files: save or copy the whole folder again",
                )


def _make_rename(label: str, *, optimizer: bool) -> Callable[[str], str]:
    def rename(name: str) -> str:
        top, dot, inner = name.partition(".")
        if optimizer:
            inner = inner if dot and top in ("optimizer", "optimizer_state_dict") else name
            return ".".join(filter(None, ("optimizer", label, inner)))
        if not label:
            return name
        return f"{top}.{label}.{inner}" if dot and top in _TOPS else f"{label}.{name}"

    return rename


def _find_shared_values(opened: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the top-level values that are equal in all files that have them, such as the iteration."""
    first = {name: value for part in reversed(opened) for name, value in part.values.items() if "." not in name}
    return {
        name: value
        for name, value in first.items()
        if all(part.values[name] == value for part in opened if name in part.values)
    }
