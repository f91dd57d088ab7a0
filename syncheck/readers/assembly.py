"""Combine several files into one checkpoint, as most folder formats require."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile, brief
from syncheck.names import make_unique_name
from syncheck.snapshots import Metadata, Snapshot, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.messages import Message


def as_stored(name: str) -> str:
    """Return the name unchanged."""
    return name


@dataclass
class Assembly:
    """A checkpoint made of several files. folder: its path. format: of the whole folder."""

    folder: str
    format: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    stubs: set[str] = field(default_factory=set)
    bytes: int = 0
    metadata: Metadata | None = None
    notes: list[Message] = field(default_factory=list)

    def add(self, part: Snapshot, rename: Callable[[str], str] = as_stored) -> None:
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
                self.values[make_unique_name(full, self.values)] = value
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
        return Snapshot(self.folder, self.format, self.bytes, self.tensors, self.values, stubs, self.metadata, notes)
