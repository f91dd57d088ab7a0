"""What the formats that are folders share: one checkpoint put together from several files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, UnreadableFile, brief
from syncheck.names import free_name
from syncheck.readers.json_text import NotTheObject, json_object
from syncheck.readers.opening import regular
from syncheck.snapshots import Metadata, Snapshot, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_JSON = 100_000_000  # bytes; as much as a safetensors header may have. An index of 50,000 tensors has 5 MB.


def names_in(folder: str) -> list[str]:
    """List what lies in a folder, in a fixed order. Raises OSError."""
    return sorted(os.listdir(folder))


def as_stored(name: str) -> str:
    """Name a tensor as its file does."""
    return name


def below(top: str, label: str) -> Callable[[str], str]:
    """Return how to name what a file holds that is all of one thing, such as `optimizer`.

    top: what the names begin with; those that begin so already get it once. label: what tells this file from others
    of its kind, empty where there is no other.
    """
    start = f"{top}.{label}" if label else top

    def rename(name: str) -> str:
        inner = name.removeprefix(f"{top}.")
        return f"{start}.{inner}" if inner else start

    return rename


@dataclass
class Assembly:
    """One checkpoint made of several files. folder: which it is; format: of the whole."""

    folder: str
    format: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    stubs: set[str] = field(default_factory=set)
    bytes: int = 0
    metadata: Metadata | None = None
    notes: list[str] = field(default_factory=list)

    def add(self, part: Snapshot, rename: Callable[[str], str] = as_stored) -> None:
        """Add what a file holds. Of two tensors that end at one name both are kept, the second as `name#2`.

        So are two values, unless they are equal: every shard of safetensors says `format = 'pt'`.
        """
        for name, tensor in part.tensors.items():
            free = free_name(rename(name), self.tensors)
            self.tensors[free] = tensor if free == tensor.name else replace(tensor, name=free)
        for name, value in part.values.items():
            full = rename(name)
            known = self.values.get(full)
            if full not in self.values or type(known) is not type(value) or known != value:
                self.values[free_name(full, self.values)] = value
        self.stubs |= set(part.stubs)
        self.bytes += part.bytes
        self._check_run(part)
        self.metadata = self.metadata or part.metadata
        self.notes += [note for note in part.notes if note not in self.notes]

    def _check_run(self, part: Snapshot) -> None:
        """Raise MalformedFile where the metadata blocks of two files say that they are of different runs or steps."""
        for what in ("run_id", "step"):
            known, own = getattr(self.metadata, what, None), getattr(part.metadata, what, None)
            if None not in (known, own) and known != own:
                raise MalformedFile(
                    part.path, place=f"metadata, {what}", found=brief(own), needed=f"{brief(known)}, as before it",
                    next_step="it is of another run or step than the rest: save or copy the whole folder again",
                )  # fmt: skip

    def snapshot(self) -> Snapshot:
        """Return the whole. Its path is the folder, its size that of all files read."""
        stubs = tuple(sorted(self.stubs))
        notes = tuple(self.notes)
        return Snapshot(self.folder, self.format, self.bytes, self.tensors, self.values, stubs, self.metadata, notes)


def read_json(path: str) -> dict[str, Any]:
    """Read a JSON object from a file. Raises MalformedFile for anything else, before reading where it is too long."""
    again = "save or copy it again"
    try:
        with regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_JSON:
                raise MalformedFile(path, found=f"{size} bytes", needed=f"at most {MAX_JSON}", next_step=again)
            raw = file.read(size)
    except OSError as error:  # what is listed in the folder may be a dangling link
        raise UnreadableFile.because(path, error) from None
    try:
        return json_object(raw)
    except NotTheObject as wrong:
        raise MalformedFile(
            path, found=wrong.found, needed=wrong.needed, next_step=f"it is cut short or damaged: {again}"
        ) from None


def numbered(pattern: re.Pattern[str], names: list[str]) -> list[re.Match[str]]:
    """Return the names that match, in the order of their numbers: part 10 comes after part 9."""
    found = [match for name in names if (match := pattern.fullmatch(name))]
    return sorted(found, key=lambda m: [int(part) for part in re.findall(r"\d+", m.string)])
