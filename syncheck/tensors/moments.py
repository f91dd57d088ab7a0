"""Compute minimum, maximum, mean and standard deviation of the finite elements of a tensor, block by block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# The keys of `Moments.values`.
NAMES = ("min", "max", "mean", "std")


class Moments:
    """Running moments of one tensor. Complex tensors have none."""

    def __init__(self, dtype: str) -> None:
        self._row = DTYPES[dtype]
        self._count = 0
        self._mean = 0.0
        # The sum of squared deviations from the mean.
        self._square = 0.0
        self._nonfinite = 0
        self._low = math.inf
        self._high = -math.inf

    def add(self, data: bytes | bytearray) -> None:
        """Add elements, as little-endian bytes."""
        if self._row.family == "complex":
            return

        with np.errstate(all="ignore"):
            block = np.frombuffer(data, self._row.dtype()).astype(np.float64)
            finite = block[np.isfinite(block)]
            self._nonfinite += block.size - finite.size
            if not finite.size:
                return

            self._low = min(self._low, float(finite.min()))
            self._high = max(self._high, float(finite.max()))
            # Chan, Golub, LeVeque 1979: merge the mean and the sum of squared deviations of the block into the total.
            delta = float(finite.mean()) - self._mean
            total = self._count + finite.size
            self._square += float(finite.var()) * finite.size + delta * delta * self._count * finite.size / total
            self._mean += delta * finite.size / total
            self._count = total

    def values(self) -> dict[str, float | None]:
        """Return min, max, mean and std in float64; None if no element is finite, or on overflow."""
        moments: dict[str, float | None] = dict.fromkeys(NAMES)
        if not self._count:
            return moments

        deviation = math.sqrt(self._square / self._count)
        numbers = (self._low, self._high, self._mean, deviation)
        for name, number in zip(NAMES, numbers, strict=True):
            if math.isfinite(number):
                moments[name] = number

        return moments

    @property
    def nonfinite(self) -> int | None:
        """Number of infinities and NaNs; None for complex tensors."""
        return None if self._row.family == "complex" else self._nonfinite


def compute_moments(tensor: Tensor, files: Files) -> Moments:
    """Read a tensor and return its moments. Raises CheckpointError if the file can no longer be read."""
    moments = Moments(tensor.dtype)
    for start, count in ranges([tensor]):
        moments.add(files.read(tensor, start, count, slot=0))

    return moments
