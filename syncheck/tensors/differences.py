"""Measure the differences between replicas of one tensor, in one pass over one replica of each cluster.

Floats of every width are compared by absolute and relative difference, and in ULPs of the dtype. The results equal
float64 arithmetic on every element. Most of the work is done in float32, which is four times as fast. Rounding is
monotonic, so the largest differences are among those with the largest rounded difference, and only these elements are
computed again in float64.

This module needs numpy and is imported only if replicas differ.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.snapshots import unravel_index
from syncheck.tensors.blocks import run_in_shares
from syncheck.tensors.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncheck.records import Extent
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.tolerance import Tolerance

    Array = NDArray[Any]

# glibc keeps freed memory only after a larger block has been freed (mallopt(3), M_MMAP_THRESHOLD is dynamic). Without
# this, half of the time is spent on page faults.
_FREED_FIRST = 8 << 20  # bytes; more than all temporary arrays of a block
# If fewer than one in this many elements differ, they are copied out of the block before they are measured.
_FEW = 4
# Relative differences in float32 are rounded twice; if their ratio is above this bound, their order is uncertain.
_DOUBT = np.float32(1 - 2.0**-21)
# The smallest positive float32: avoids 0 / 0 = NaN and changes no other quotient.
_TINY = np.float32(2.0**-149)


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

    def size(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of a `TensorDiff` about the largest difference of a tensor of this shape."""
        index = None if self.worst is None else unravel_index(self.worst, shape)
        return {"max_abs": self.max_abs, "max_rel": self.max_rel, "max_ulp": self.max_ulp, "index": index}

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
        self.max_rel = max(self.max_rel or 0.0, difference)

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
            self.max_ulp = max(self.max_ulp or 0, other.max_ulp)
        self.nonfinite = [a + b for a, b in zip(self.nonfinite, other.nonfinite, strict=True)]


def measure_differences(tensors: Sequence[Tensor], files: Files, tolerance: Tolerance, *, majority: bool) -> Statistics:
    """Measure the differences between tensors whose bytes differ, one tensor of each cluster.

    tensors: two or more, with the same dtype and shape. majority: whether the first tensor represents the majority. If
    so, differences are measured against it, else between the lowest and the highest value of each element. A tolerance
    applies to every pair of replicas, so with a tolerance the lowest and the highest value always count.

    Floats are subtracted in float64 (complex numbers by their parts), integers without overflow. An ULP is the step
    between neighbouring floats of the dtype; 0.0 and -0.0 are equal.
    """
    row = DTYPES[tensors[0].dtype]
    dtype = row.dtype()
    np.empty(_FREED_FIRST, np.uint8)
    majority = majority and tolerance.exact

    def measure_share(share: Iterator[tuple[int, int]], job: int) -> Statistics:
        total = Statistics(nonfinite=[0] * len(tensors))
        with np.errstate(all="ignore"):
            for start, count in share:
                blocks = [files.read(t, start, count, job * len(tensors) + i) for i, t in enumerate(tensors)]
                if all(block == blocks[0] for block in blocks[1:]):
                    blocks = blocks[:1]
                arrays = [np.frombuffer(block, dtype) for block in blocks]
                if row.family in ("float", "complex"):
                    arrays = [widen(row, array) for array in arrays]
                finite = _find_finite(row, arrays, total)
                if len(arrays) > 1:
                    _measure_block(row, arrays, finite, start, total, tolerance, majority)
        return total

    first, *others = run_in_shares(tensors, files, measure_share)
    for other in others:
        first.add(other)
    return first


def _find_finite(row: DType, arrays: Sequence[Array], total: Statistics) -> Array | None:
    """Count NaNs and infinities, and return a mask of the elements that are finite in all arrays; None if all are.

    A single array represents all replicas.
    """
    if row.family not in ("float", "complex"):
        return None
    masks = [np.isfinite(array) for array in arrays]
    if all(mask.all() for mask in masks):
        return None
    if row.family == "complex":
        counts = [int(np.count_nonzero(~(mask[0::2] & mask[1::2]))) for mask in masks]
    else:
        counts = [mask.size - int(np.count_nonzero(mask)) for mask in masks]
    for i in range(len(total.nonfinite)):
        total.nonfinite[i] += counts[i if len(counts) > 1 else 0]
    everywhere: Array = np.logical_and.reduce(masks)
    return everywhere


def _measure_block(
    row: DType,
    arrays: list[Array],
    finite: Array | None,
    start: int,
    total: Statistics,
    tolerance: Tolerance,
    majority: bool,
) -> None:
    """Measure one block in which replicas differ. finite: mask from `_find_finite`."""
    parts = 2 if row.family == "complex" else 1
    differs = find_differing(arrays, finite is None)
    elements = differs[0::2] | differs[1::2] if parts == 2 else differs
    count = int(np.count_nonzero(elements))
    if not count:
        return
    first = start + int(np.argmax(elements))
    last = start + elements.size - 1 - int(np.argmax(elements[::-1]))
    beyond = differs
    if finite is not None and not finite[differs].all():
        total.add_nonfinite(start + int(np.argmax(differs & ~finite)) // parts)
    picked = None
    if finite is not None or count * _FEW < elements.size or not tolerance.exact:
        picked = np.flatnonzero(differs if finite is None else differs & finite)
        arrays = [array[picked] for array in arrays]
    indices = _ElementIndices(start, picked, parts)
    if arrays[0].size and row.family in ("float", "complex"):
        tolerated = _add_float_differences(row, arrays, indices, total, tolerance, majority)
        if tolerated is not None and picked is not None:
            beyond = differs.copy()
            beyond[picked[tolerated]] = False
    elif arrays[0].size:
        _add_integer_differences(row, arrays, indices, total, majority)
    if parts == 2:
        beyond = beyond[0::2] | beyond[1::2]
    total.add_mismatches(count, int(np.count_nonzero(beyond)), first, last)


def find_differing(arrays: Sequence[Array], finite: bool = False) -> Array:
    """Return a mask of elements whose values differ. NaNs are equal to each other, whatever their payloads.

    finite: whether no array contains a NaN.
    """
    differs: Array = arrays[0] != arrays[1]
    for other in arrays[2:]:
        differs |= arrays[0] != other
    if not finite:
        differs &= ~np.logical_and.reduce([np.isnan(array) for array in arrays])
    return differs


def _add_integer_differences(
    row: DType, arrays: Sequence[Array], indices: _ElementIndices, total: Statistics, majority: bool
) -> None:
    """Add the differences of integers and bools to `total`.

    With a majority, each array is compared with the first array; else the lowest with the highest value of
    each element.
    """
    kind = np.int64 if row.family == "int" else np.uint64
    for low, high in pairs([array.astype(kind) for array in arrays], majority):
        difference = high.view(np.uint64) - low.view(np.uint64)  # overflow wraps around to the correct number
        at = int(np.argmax(difference))
        total.add_absolute(int(difference[at]), indices[at])
        scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        total.add_relative(float((difference.astype(np.float64) / np.maximum(scale, 1)).max()))


def widen(row: DType, array: Array) -> Array:
    """Convert floats to float32 or float64 without rounding. Complex numbers become their real and imaginary parts."""
    if row.family == "complex":
        parts: Array = array.view(f"float{row.size * 4}")
        return parts
    if row.name == "bfloat16":  # the upper half of a float32
        return np.left_shift(array.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)
    return array if row.size >= 4 else array.astype(np.float32)


def read_float64(tensor: Tensor, files: Files, start: int, count: int, slot: int) -> Array:
    """Read elements as float64. Complex numbers become their real and imaginary parts."""
    row = DTYPES[tensor.dtype]
    with np.errstate(invalid="ignore"):  # converting a signalling NaN is an invalid operation
        return widen(row, np.frombuffer(files.read(tensor, start, count, slot), row.dtype())).astype(np.float64)


def pairs(arrays: Sequence[Array], majority: bool) -> Iterator[tuple[Array, Array]]:
    """Yield pairs (lower, upper) to subtract.

    With a majority, pairs are the first array and each other array; else the lowest and highest value of each element.
    """
    if majority:
        for other in arrays[1:]:
            yield np.minimum(arrays[0], other), np.maximum(arrays[0], other)
        return
    low, high = np.minimum(arrays[0], arrays[1]), np.maximum(arrays[0], arrays[1])
    for other in arrays[2:]:
        np.minimum(low, other, out=low)
        np.maximum(high, other, out=high)
    yield low, high


def _add_float_differences(
    row: DType,
    arrays: Sequence[Array],
    indices: _ElementIndices,
    total: Statistics,
    tolerance: Tolerance,
    majority: bool,
) -> Array | None:
    """Add the differences of finite elements to `total`. arrays: results of `widen`.

    Returns a mask of the elements within the tolerance; None if the comparison is exact.
    """
    tolerated = None if tolerance.exact else np.ones(arrays[0].size, bool)
    for low, high in pairs(arrays, majority):
        (_add_float32 if low.dtype == np.float32 else _add_float64)(low, high, indices, total)
        steps = _count_ulps(row, low, high)
        total.max_ulp = max(total.max_ulp or 0, int(steps.max()))
        if tolerated is not None:
            tolerated &= _is_close(low, high, steps, tolerance)
    return tolerated


class _ElementIndices:
    """Maps positions in an array to flat indices of elements in the tensor.

    start: the first element of the block. picked: the positions that were copied from the block, None for all. parts:
    numbers per element, 2 for complex numbers.
    """

    def __init__(self, start: int, picked: Array | None = None, parts: int = 1) -> None:
        self._start, self._picked, self._parts = start, picked, parts

    def __getitem__(self, at: int) -> int:
        """Return the flat index of the element at position `at`."""
        return self._start + (at if self._picked is None else int(self._picked[at])) // self._parts


def ordered(array: Array) -> Array:
    """Map finite floats to integers of the same width: neighbours differ by 1, and both zeros are 0.

    Source: Bruce Dawson, Comparing Floating Point Numbers (2012). The bits are read as sign and magnitude.
    """
    kind = np.dtype(f"int{array.dtype.itemsize * 8}")
    bits: Array = array.view(kind)
    negative = bits >> kind.type(kind.itemsize * 8 - 1)  # -1 or 0
    result: Array = np.bitwise_and(negative, np.iinfo(kind).max)
    np.bitwise_xor(bits, result, out=result)
    np.subtract(result, negative, out=result)
    return result


def _count_ulps(row: DType, low: Array, high: Array) -> Array:
    """Return the number of steps of the dtype between floats, as unsigned integers."""
    if row.size < 4 and row.name != "bfloat16":
        low, high = low.astype(row.dtype()), high.astype(row.dtype())
    if row.name == "float8_e8m0fnu":  # powers of two without a sign: the bits have the order of the values
        return np.subtract(high.view(np.uint8), low.view(np.uint8))
    below, above = ordered(low), ordered(high)
    steps: Array = np.subtract(above, below, out=above).view(f"uint{above.dtype.itemsize * 8}")
    return np.right_shift(steps, np.uint32(16), out=steps) if row.name == "bfloat16" else steps


def _add_float32(low: Array, high: Array, indices: _ElementIndices, total: Statistics) -> None:
    """Add differences of float32 values. Only candidates for the maximum are computed in float64."""
    difference = high - low
    top = difference.max()
    if np.isinf(top):
        _add_float64(low.astype(np.float64), high.astype(np.float64), indices, total)
        return
    if total.max_abs is None or top >= np.float32(total.max_abs):
        at = np.flatnonzero(difference == top)
        exact = high[at].astype(np.float64) - low[at]
        best = int(np.argmax(exact))
        total.add_absolute(float(exact[best]), indices[int(at[best])])
    # Since low <= high, the larger magnitude is max(-low, high).
    scale = np.negative(low)
    np.maximum(scale, high, out=scale)
    np.maximum(scale, _TINY, out=scale)
    relative = np.divide(difference, scale, out=difference)
    least = relative.max() * _DOUBT
    if total.max_rel is None or least > total.max_rel * _DOUBT * _DOUBT:
        at = np.flatnonzero(relative >= least)
        total.add_relative(float(((high[at].astype(np.float64) - low[at]) / scale[at]).max()))


def _add_float64(low: Array, high: Array, indices: _ElementIndices, total: Statistics) -> None:
    difference = high - low
    scale = np.maximum(-low, high)
    np.maximum(scale, np.nextafter(0.0, 1.0), out=scale)
    relative = difference / scale
    top = float(difference.max())
    if top == float("inf"):  # the difference of finite numbers overflows, so divide before subtracting
        over = np.isinf(difference)
        relative[over] = np.abs(low[over] / scale[over] - high[over] / scale[over])
        np.minimum(difference, sys.float_info.max, out=difference)
    best = int(np.argmax(difference))
    total.add_absolute(float(difference[best]), indices[best])
    total.add_relative(float(relative.max()))


def _is_close(low: Array, high: Array, steps: Array, tolerance: Tolerance) -> Array:
    """Return a mask of the elements within the tolerance.

    low and high are the extreme values of all replicas. If they are close, every pair of replicas is close: for
    low <= a <= b <= high and rtol <= 1, b - a - rtol * max(|a|, |b|) is min(b - (1 - rtol) * a, (1 - rtol) * b - a),
    which increases with b and decreases with a. The same holds for the number of ULPs.
    """
    close = np.zeros(low.size, bool)
    if tolerance.rtol is not None and tolerance.atol is not None:
        a, b = low.astype(np.float64), high.astype(np.float64)
        scale = np.where(np.isinf(b - a), 0.25, 1.0)  # the difference of finite numbers may overflow
        a, b = a * scale, b * scale
        close |= b - a <= tolerance.atol * scale + tolerance.rtol * np.maximum(-a, b)
    if tolerance.ulp is not None:
        close |= steps <= min(tolerance.ulp, np.iinfo(steps.dtype).max)
    return close
