"""What is known of the gaps between replicas of one tensor: kept block by block, and put together over threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.records import Extent


@dataclass
class Statistics:
    """How far one replica of each cluster lies from the others; fields as in `records.TensorDiff`.

    beyond: mismatched elements that the tolerance does not excuse. nonfinite: by position among the representatives.
    """

    mismatched: int = 0
    beyond: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    nonfinite: list[int] = field(default_factory=list)
    worst: int | None = None
    """Flat index of the greatest gap; of the first element that is not finite everywhere, if there is one."""
    worst_nonfinite: bool = False
    first: int | None = None
    last: int | None = None

    def extent(self, numel: int) -> Extent | None:
        """Say how the mismatched elements lie in C order."""
        if self.first is None or self.last is None:
            return None
        if self.mismatched == numel:
            return "all"
        if self.mismatched == 1:
            return "one"
        return "contiguous" if self.last - self.first + 1 == self.mismatched else "scattered"

    def mismatch(self, count: int, beyond: int, first: int, last: int) -> None:
        """Count elements that differ, of which `beyond` no tolerance excuses, and where they begin and end."""
        self.mismatched += count
        self.beyond += beyond
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)

    def keep(self, gap: float, where: int) -> None:
        """Keep the greatest gap; of equal ones the first, whichever pair of replicas it came from."""
        greater = self.max_abs is None or gap > self.max_abs
        tied = gap == self.max_abs and self.worst is not None and where < self.worst
        if greater:
            self.max_abs = gap
        if (greater or tied) and not self.worst_nonfinite:
            self.worst = where

    def keep_relative(self, gap: float) -> None:
        """Keep the greatest relative gap."""
        self.max_rel = gap if self.max_rel is None else max(self.max_rel, gap)

    def keep_ulp(self, steps: int) -> None:
        """Keep the greatest number of steps between neighbouring floats."""
        self.max_ulp = steps if self.max_ulp is None else max(self.max_ulp, steps)

    def keep_nonfinite(self, where: int) -> None:
        """Point at an element that is not finite everywhere rather than at the greatest gap: at the first of them."""
        if not self.worst_nonfinite or self.worst is None or where < self.worst:
            self.worst, self.worst_nonfinite = where, True

    def add(self, other: Statistics) -> None:
        """Take in what was found in other blocks of the same tensors, in any order."""
        if other.first is not None and other.last is not None:
            self.mismatch(other.mismatched, other.beyond, other.first, other.last)
        if other.worst_nonfinite and other.worst is not None:
            self.keep_nonfinite(other.worst)
        if other.max_abs is not None and other.worst is not None:
            self.keep(other.max_abs, other.worst)
        if other.max_rel is not None:
            self.keep_relative(other.max_rel)
        if other.max_ulp is not None:
            self.keep_ulp(other.max_ulp)
        self.nonfinite = [a + b for a, b in zip(self.nonfinite, other.nonfinite, strict=True)]
