"""What a resync did: the record that it returns, and its words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import one_line
from syncheck.live.repair.plan import named
from syncheck.records import ranks_text
from syncheck.report import words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Report


class Copied(NamedTuple):
    """A tensor whose bytes were sent. bytes: of the tensor, or of the replica group's piece of it."""

    name: str
    source: int
    ranks: tuple[int, ...]
    bytes: int


class Changed(NamedTuple):
    """A value that was set, or state that was created or removed, and on which ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Resync:
    """What `resync` did; the same on all ranks.

    before: the report that found what to do. after: the one that proves it done; the same where nothing was to be done.
    sources: the healthy rank by replica group. why: how it was chosen. copied: tensors whose bytes were sent, those
    that were created among them. values: plain ones, set to the source's. created: optimizer state that a rank lacked.
    removed: what it had more of it than the source.
    """

    before: Report
    after: Report
    sources: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    why: str = ""
    copied: tuple[Copied, ...] = ()
    values: tuple[Changed, ...] = ()
    created: tuple[Changed, ...] = ()
    removed: tuple[Changed, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that were copied."""
        return sum(copied.bytes for copied in self.copied)

    @property
    def summary(self) -> str:
        """What was done, in a few lines of plain text."""
        if self.before is self.after:
            return "resync: nothing to do, the ranks are in sync"
        changed = (*self.values, *self.created, *self.removed)
        touched = [of.ranks for of in self.copied] + [of.ranks for of in changed]
        targets = sorted({rank for ranks in touched for rank in ranks})
        sources = tuple(sorted(set(self.sources.values())))
        size = f"{self.bytes} bytes" if self.bytes < 1000 else words.bytes_text(self.bytes)
        what = f"{_counted(len(self.copied), 'tensor')}, {size}"
        if self.values:
            what += f", {_counted(len(self.values), 'value')}"
        lines = [f"resync from {ranks_text(sources)} ({self.why}): {what}, on {ranks_text(targets)}; proved in sync"]
        of: tuple[tuple[str, Sequence[Copied | Changed]], ...] = (
            ("copied", self.copied), ("set", self.values), ("created", self.created), ("removed", self.removed),
        )  # fmt: skip
        for verb, done in of:
            # The ranks stand in the first line already where they are the same throughout.
            told = (c.name if list(c.ranks) == targets else f"{c.name} ({ranks_text(c.ranks)})" for c in done)
            lines += [f"  {verb}: {named(told)}"] if done else []
        return "\n".join(map(one_line, lines))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"
