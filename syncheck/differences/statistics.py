"""Accumulate the differences between replicas of one tensor over blocks and threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from syncheck.records import Extent


@dataclass
class Statistics:
    """Differences between the representatives of clusters; fields as in `records.TensorDiff`.

    beyond: mismatched elements outside the tolerance. nonfinite: by position of the representative.
    """

    mismatched: int = 0
    beyond: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    nonfinite: list[int] = field(default_factory=list)
    worst: int | None = None
    """Flat index of the first element that is NaN or infinite on some replica, else of the largest difference."""
    worst_nonfinite: bool = False
    first: int | None = None
    last: int | None = None

    def extent(self, numel: int) -> Extent | None:
        """Return how the mismatched elements are distributed in C order."""
        if self.first is None or self.last is None:
            return None
        if self.mismatched == numel:
            return "all"
        if self.mismatched == 1:
            return "one"
        return "contiguous" if self.last - self.first + 1 == self.mismatched else "scattered"

    def add_mismatches(self, count: int, beyond: int, first: int, last: int) -> None:
        """Add elements that differ. beyond: number of elements outside the tolerance. first, last: flat indices."""
        self.mismatched += count
        self.beyond += beyond
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)

    def add_absolute(self, difference: float, index: int) -> None:
        """Add an absolute difference. If differences are equal, the lowest index wins."""
        larger = self.max_abs is None or difference > self.max_abs
        tied = difference == self.max_abs and self.worst is not None and index < self.worst
        if larger:
            self.max_abs = difference
        if (larger or tied) and not self.worst_nonfinite:
            self.worst = index

    def add_relative(self, difference: float) -> None:
        """Add a relative difference."""
        self.max_rel = difference if self.max_rel is None else max(self.max_rel, difference)

    def add_ulp(self, steps: int) -> None:
        """Add a difference in ULPs."""
        self.max_ulp = steps if self.max_ulp is None else max(self.max_ulp, steps)

    def add_nonfinite(self, index: int) -> None:
        """Add an element that is NaN or infinite on some replica. It takes precedence as `worst`."""
        if not self.worst_nonfinite or self.worst is None or index < self.worst:
            self.worst, self.worst_nonfinite = index, True

    def add(self, other: Statistics) -> None:
        """Add the statistics of other blocks of the same tensors."""
        if other.first is not None and other.last is not None:
            self.add_mismatches(other.mismatched, other.beyond, other.first, other.last)
        if other.worst_nonfinite and other.worst is not None:
            self.add_nonfinite(other.worst)
        if other.max_abs is not None and other.worst is not None:
            self.add_absolute(other.max_abs, other.worst)
        if other.max_rel is not None:
            self.add_relative(other.max_rel)
        if other.max_ulp is not None:
            self.add_ulp(other.max_ulp)
        self.nonfinite = [a + b for a, b in zip(self.nonfinite, other.nonfinite, strict=True)]
