"""The differences between replicas of one tensor, as sums and extremes over the blocks that were measured."""

from __future__ import annotations

import sys
from dataclasses import field
from typing import TYPE_CHECKING, Any

from syncheck.frozen import mutable_record
from syncheck.snapshots import unravel_index

if TYPE_CHECKING:
    from syncheck.records import Extent


@mutable_record
class Statistics:
    """Differences between the representatives of clusters; fields as in `records.TensorDiff`.

    beyond: mismatched elements outside the tolerance.
    nonfinite: by position of the representative.
    largest: flat index of the first of the largest differences; it has no meaning without `max_abs`.
    first_nonfinite: flat index of the first differing element that is NaN or infinite on some replica.
    first, last: flat indices of mismatched elements.
    Without such elements, a first index is larger than every index, and the last is smaller.
    """

    mismatched: int = 0
    beyond: int = 0
    max_abs: float | int | None = None
    max_rel: float | None = None
    max_ulp: int | None = None
    nonfinite: list[int] = field(default_factory=list)
    largest: int = 0
    first_nonfinite: int = sys.maxsize
    first: int = sys.maxsize
    last: int = -1

    def extent(self, numel: int) -> Extent | None:
        """Return how the mismatched elements are distributed in C order."""
        if not self.mismatched:
            return None

        if self.mismatched == numel:
            return "all"

        if self.mismatched == 1:
            return "one"

        has_no_gaps = self.last - self.first + 1 == self.mismatched
        return "contiguous" if has_no_gaps else "scattered"

    def size(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of a `TensorDiff` about the largest difference of a tensor of this shape.

        The index is that of an element which is NaN or infinite on some replica, if any.
        """
        index = None
        if self.first_nonfinite < sys.maxsize:
            index = unravel_index(self.first_nonfinite, shape)
        elif self.max_abs is not None:
            index = unravel_index(self.largest, shape)

        return {
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "max_ulp": self.max_ulp,
            "index": index,
        }

    def add_mismatches(self, count: int, beyond: int, first: int, last: int) -> None:
        """Add elements that differ. beyond: number of elements outside the tolerance. first, last: flat indices."""
        self.mismatched += count
        self.beyond += beyond
        self.first = min(self.first, first)
        self.last = max(self.last, last)

    def add_absolute(self, difference: float, index: int) -> None:
        """Add an absolute difference. If differences are equal, the lowest index wins."""
        if self.max_abs is None or (difference, -index) > (self.max_abs, -self.largest):
            self.max_abs = difference
            self.largest = index

    def add_relative(self, difference: float) -> None:
        """Add a relative difference."""
        self.max_rel = max(self.max_rel or 0.0, difference)

    def add_ulp(self, steps: int) -> None:
        """Add a difference in ULPs."""
        self.max_ulp = max(self.max_ulp or 0, steps)

    def add_nonfinite(self, index: int) -> None:
        """Add a differing element that is NaN or infinite on some replica."""
        self.first_nonfinite = min(self.first_nonfinite, index)

    def add(self, statistics: Statistics) -> None:
        """Add the statistics of other blocks of the same tensors."""
        self.add_mismatches(
            statistics.mismatched,
            statistics.beyond,
            statistics.first,
            statistics.last,
        )
        self.add_nonfinite(statistics.first_nonfinite)
        for position, count in enumerate(statistics.nonfinite):
            self.nonfinite[position] += count

        if statistics.max_abs is not None:
            self.add_absolute(statistics.max_abs, statistics.largest)

        if statistics.max_rel is not None:
            self.add_relative(statistics.max_rel)

        if statistics.max_ulp is not None:
            self.add_ulp(statistics.max_ulp)
