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

_FLOATING = ("float", "complex")
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

        return {"max_abs": self.max_abs, "max_rel": self.max_rel, "max_ulp": self.max_ulp, "index": index}

    def add_mismatches(self, count: int, beyond: int, first: int, last: int) -> None:
        """Add elements that differ. beyond: number of elements outside the tolerance. first, last: flat indices."""
        self.mismatched += count
        self.beyond += beyond
        self.first = min(self.first, first)
        self.last = max(self.last, last)

    def add_absolute(self, difference: float, index: int) -> None:
        """Add an absolute difference. If differences are equal, the lowest index wins."""
        if self.max_abs is None or (difference, -index) > (self.max_abs, -self.largest):
            self.max_abs, self.largest = difference, index

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
        first_slot = job * len(tensors)
        with np.errstate(all="ignore"):
            for start, count in share:
                blocks = []
                for slot, tensor in enumerate(tensors, first_slot):
                    blocks.append(files.read(tensor, start, count, slot))

                are_equal = all(block == blocks[0] for block in blocks[1:])
                if are_equal:
                    del blocks[1:]

                arrays = [np.frombuffer(block, dtype) for block in blocks]
                if row.family in _FLOATING:
                    arrays = [widen(row, array) for array in arrays]

                finite = _find_finite(row, arrays, total)
                if not are_equal:
                    _measure_block(
                        row,
                        arrays,
                        finite,
                        start,
                        total,
                        tolerance,
                        majority,
                    )

        return total

    total, *other_totals = run_in_shares(tensors, files, measure_share)
    for statistics in other_totals:
        total.add(statistics)

    return total


def _find_finite(row: DType, arrays: Sequence[Array], total: Statistics) -> Array | None:
    """Count NaNs and infinities, and return a mask of the elements that are finite in all arrays; None if all are.

    A single array represents all replicas.
    """
    if row.family not in _FLOATING:
        return None

    masks = [np.isfinite(array) for array in arrays]
    if all(mask.all() for mask in masks):
        return None

    counts = []
    for mask in masks:
        finite_elements = mask
        if row.family == "complex":
            finite_elements = mask[0::2] & mask[1::2]
        counts.append(finite_elements.size - int(np.count_nonzero(finite_elements)))

    if len(counts) == 1:
        counts *= len(total.nonfinite)

    for position, count in enumerate(counts):
        total.nonfinite[position] += count

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
    elements = _merge_parts(row, differs)
    count = int(np.count_nonzero(elements))
    if not count:
        return

    measured = differs
    if finite is not None:
        measured = differs & finite
        differs_nonfinite = differs & ~finite
        if differs_nonfinite.any():
            total.add_nonfinite(start + int(np.argmax(differs_nonfinite)) // parts)

    picked = None
    are_few = count * _FEW < elements.size
    if finite is not None or are_few or not tolerance.exact:
        picked = np.flatnonzero(measured)
        arrays = [array[picked] for array in arrays]

    beyond = differs
    indices = _ElementIndices(start, picked, parts)
    if row.family not in _FLOATING:
        _add_integer_differences(
            row,
            arrays,
            indices,
            total,
            majority,
        )
    elif arrays[0].size:  # else, all differences are between numbers that are not finite
        tolerated = _add_float_differences(
            row,
            arrays,
            indices,
            total,
            tolerance,
            majority,
        )
        if tolerated is not None and picked is not None:
            beyond = differs.copy()
            beyond[picked[tolerated]] = False

    first = start + int(np.argmax(elements))
    last = start + elements.size - 1 - int(np.argmax(elements[::-1]))
    total.add_mismatches(
        count,
        int(np.count_nonzero(_merge_parts(row, beyond))),
        first,
        last,
    )


def _merge_parts(row: DType, mask: Array) -> Array:
    """Return a mask of elements, given a mask of numbers: a complex number has two."""
    if row.family != "complex":
        return mask

    merged: Array = mask[0::2] | mask[1::2]
    return merged


def find_differing(arrays: Sequence[Array], finite: bool = False) -> Array:
    """Return a mask of elements whose values differ. NaNs are equal to each other, whatever their payloads.

    finite: whether no array contains a NaN.
    """
    differs: Array = arrays[0] != arrays[1]
    for array in arrays[2:]:
        differs |= arrays[0] != array

    if not finite:
        all_nan = np.logical_and.reduce([np.isnan(array) for array in arrays])
        differs &= ~all_nan

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
        largest = int(np.argmax(difference))
        total.add_absolute(int(difference[largest]), indices[largest])
        scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        total.add_relative(float((difference.astype(np.float64) / np.maximum(scale, 1)).max()))


def widen(row: DType, array: Array) -> Array:
    """Convert floats to float32 or float64 without rounding. Complex numbers become their real and imaginary parts."""
    if row.family == "complex":
        parts: Array = array.view(f"float{row.size * 4}")
        return parts

    if row.name == "bfloat16":  # the upper half of a float32
        return np.left_shift(array.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)

    if row.size < 4:
        return array.astype(np.float32)

    return array


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
        for array in arrays[1:]:
            yield np.minimum(arrays[0], array), np.maximum(arrays[0], array)
        return

    low, high = np.minimum(arrays[0], arrays[1]), np.maximum(arrays[0], arrays[1])
    for array in arrays[2:]:
        np.minimum(low, array, out=low)
        np.maximum(high, array, out=high)
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
        if low.dtype == np.float32:
            _add_float32(low, high, indices, total)
        else:
            _add_float64(low, high, indices, total)

        steps = _count_ulps(row, low, high)
        total.add_ulp(int(steps.max()))
        if tolerated is not None:
            tolerated &= _is_close(low, high, steps, tolerance)

    return tolerated


class _ElementIndices:
    """Maps positions in an array to flat indices of elements in the tensor.

    start: the first element of the block.
    picked: the positions that were copied from the block, None for all.
    parts: numbers per element, 2 for complex numbers.
    """

    def __init__(self, start: int, picked: Array | None = None, parts: int = 1) -> None:
        self._start, self._picked, self._parts = start, picked, parts

    def __getitem__(self, position: int) -> int:
        """Return the flat index of the element at a position."""
        if self._picked is not None:
            position = int(self._picked[position])

        return self._start + position // self._parts


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
    if row.name == "bfloat16":
        np.right_shift(steps, np.uint32(16), out=steps)

    return steps


def _add_float32(low: Array, high: Array, indices: _ElementIndices, total: Statistics) -> None:
    """Add differences of float32 values. Only candidates for the maximum are computed in float64."""
    difference = high - low
    largest = difference.max()
    if np.isinf(largest):
        _add_float64(low.astype(np.float64), high.astype(np.float64), indices, total)
        return

    if total.max_abs is None or largest >= np.float32(total.max_abs):
        candidates = np.flatnonzero(difference == largest)
        exact = high[candidates].astype(np.float64) - low[candidates]
        best = int(np.argmax(exact))
        total.add_absolute(float(exact[best]), indices[int(candidates[best])])

    # Since low <= high, the larger magnitude is max(-low, high).
    scale = np.negative(low)
    np.maximum(scale, high, out=scale)
    np.maximum(scale, _TINY, out=scale)
    relative = np.divide(difference, scale, out=difference)
    least = relative.max() * _DOUBT
    if total.max_rel is None or least > total.max_rel * _DOUBT * _DOUBT:
        candidates = np.flatnonzero(relative >= least)
        exact = high[candidates].astype(np.float64) - low[candidates]
        total.add_relative(float((exact / scale[candidates]).max()))


def _add_float64(low: Array, high: Array, indices: _ElementIndices, total: Statistics) -> None:
    """Add differences of float64 values."""
    difference = high - low
    scale = np.maximum(-low, high)
    np.maximum(scale, np.nextafter(0.0, 1.0), out=scale)
    relative = difference / scale
    if np.isinf(difference.max()):  # the difference of finite numbers overflows, so divide before subtracting
        overflows = np.isinf(difference)
        relative[overflows] = np.abs(low[overflows] / scale[overflows] - high[overflows] / scale[overflows])
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
        most_steps = min(tolerance.ulp, np.iinfo(steps.dtype).max)
        close |= steps <= most_steps

    return close
