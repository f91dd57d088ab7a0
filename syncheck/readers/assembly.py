"""List the files of a folder, and combine them into one checkpoint."""

from __future__ import annotations

import math
import os
import re
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.frozen import mutable_record
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


class Part(NamedTuple):
    """A file of a model-parallel or ZeRO rank."""

    path: str
    label: str
    """Distinguishes the file from others of its kind; empty for a single file."""
    is_optimizer: bool
    """Whether all of it is optimizer state."""


def list_numbers(text: str) -> tuple[int, ...]:
    """Return all whole numbers in a name."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def match_in_order(pattern: re.Pattern[str], names: Iterable[str]) -> list[re.Match[str]]:
    """Return the matching names in numeric order: part 10 comes after part 9."""
    results = [pattern.fullmatch(name) for name in sorted(names)]
    matches = [match for match in results if match is not None]
    matches.sort(key=_numeric_order)
    return matches


def _numeric_order(match: re.Match[str]) -> tuple[int, ...]:
    return list_numbers(match.string)


@mutable_record
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
            unique_name = make_unique_name(rename(name), self.tensors)
            if unique_name != tensor.name:
                tensor = replace(tensor, name=unique_name)
            self.tensors[unique_name] = tensor

        for name, value in part.values.items():
            unique_name = self._add_value(rename(name), value)
            if name in part.model_values:
                self.model_values[unique_name] = part.model_values[name]

        self.stubs |= set(part.stubs)
        self.bytes += part.bytes
        self._check_run(part)
        self.metadata = self.metadata or part.metadata
        self.notes += [note for note in part.notes if note not in self.notes]

    def _add_value(self, name: str, value: Any) -> str:
        """Add a value, and return its name: the name of an equal value, or a name of its own."""
        if name in self.values:
            present_value = self.values[name]
            # True and 1 are equal, but not the same value.
            if type(present_value) is type(value) and present_value == value:
                return name
        unique_name = make_unique_name(name, self.values)
        self.values[unique_name] = value
        return unique_name

    def _check_run(self, part: Snapshot) -> None:
        """Raise MalformedFile if the metadata blocks of two files have different runs or steps."""
        for key in ("run_id", "step"):
            expected = getattr(self.metadata, key, None)
            actual = getattr(part.metadata, key, None)
            if expected is None or actual is None or actual == expected:
                continue
            raise MalformedFile(
                part.path,
                place=f"metadata, {key}",
                found=brief(actual),
                needed=f"{brief(expected)}, as in the other files",
                next_step="its run or step differs from the other files: save or copy the whole folder again",
            )

    def snapshot(self) -> Snapshot:
        """Return the combined checkpoint."""
        return Snapshot(
            path=self.folder,
            format=self.format,
            bytes=self.bytes,
            tensors=self.tensors,
            values=self.values,
            stubs=tuple(sorted(self.stubs)),
            metadata=self.metadata,
            notes=tuple(self.notes),
            model_values=self.model_values,
        )


def read_parts(folder: str, format_name: str, parts: Sequence[Part]) -> Assembly:
    """Open a checkpoint in which each file of a model-parallel or ZeRO rank contains a different part.

    Labels precede the names in a file, but follow `optimizer`. Values that are equal in all files, for example the
    iteration, get no label. Raises CheckpointError for an unreadable file, or a file of another step.
    """
    assembly = Assembly(folder, format_name)
    snapshots = [read_file(part.path) for part in parts]
    # First, because combining the parts would give different steps a label.
    _check_progress(snapshots, folder)
    for snapshot, part in zip(snapshots, parts, strict=True):
        assembly.add(snapshot, _make_rename(part))

    assembly.values |= _find_shared_values(snapshots)
    return assembly


def choose_label(match: re.Match[str], matches: Sequence[re.Match[str]]) -> str:
    """Return the label of a file. It is empty for part 0 if no other part is present.

    A single part other than 0 keeps its label, because the folder is incomplete.
    match: with a group `label`.
    matches: of all parts.
    """
    is_part_0 = not any(list_numbers(match["label"]))
    return "" if is_part_0 and len(matches) == 1 else match["label"]


def note_missing_parts(part_numbers: Iterable[tuple[int, ...]], kind: str) -> list[Message]:
    """Return a note if a folder lacks parts. part_numbers: the numbers in each part's name."""
    present = set(part_numbers)
    lengths = {len(numbers) for numbers in present}
    # Names with different counts of numbers form no grid.
    if len(lengths) != 1:
        return []

    total = math.prod(max(column) + 1 for column in zip(*present, strict=True))
    missing = total - len(present)
    note = Note.PARTS_ABSENT(absent=brief(missing), total=brief(total), what=kind)
    return [note] if missing else []


def _check_progress(snapshots: Sequence[Snapshot], folder: str) -> None:
    """Raise MalformedFile if parts have different steps, which no consistent checkpoint has."""
    first_by_name: dict[str, Snapshot] = {}
    for snapshot in snapshots:
        for name in _PROGRESS.intersection(snapshot.values):
            first = first_by_name.setdefault(name, snapshot)
            if snapshot.values[name] == first.values[name]:
                continue
            raise MalformedFile(
                snapshot.path,
                place=name,
                found=brief(snapshot.values[name]),
                needed=f"{brief(first.values[name])}, as in {os.path.relpath(first.path, folder)}",
                next_step="its step differs from the other files: save or copy the whole folder again",
            )


def _make_rename(part: Part) -> Callable[[str], str]:
    """Return a function that adds the label of a part to the names in its file."""

    def rename(name: str) -> str:
        top, dot, inner = name.partition(".")
        if part.is_optimizer:
            if not dot or top not in ("optimizer", "optimizer_state_dict"):
                inner = name
            segments = ("optimizer", part.label, inner)
            return ".".join(segment for segment in segments if segment)
        if not part.label:
            return name
        if dot and top in _TOPS:
            return f"{top}.{part.label}.{inner}"
        return f"{part.label}.{name}"

    return rename


def _find_shared_values(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the top-level values that are equal in all files that have them, for example the iteration."""
    first_values: dict[str, Any] = {}
    # From the last file to the first, so that the value of the first file remains.
    for snapshot in reversed(snapshots):
        first_values |= snapshot.values
    top_values = {name: value for name, value in first_values.items() if "." not in name}
    return {name: value for name, value in top_values.items() if _is_shared(name, value, snapshots)}


def _is_shared(name: str, value: Any, snapshots: Sequence[Snapshot]) -> bool:
    return all(snapshot.values.get(name, value) == value for snapshot in snapshots)
