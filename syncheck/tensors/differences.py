"""Measure the differences between replicas of one tensor, in one pass over one replica of each cluster.

Floats of every width are compared by absolute and relative difference, and in ULPs of the dtype. The results equal
float64 arithmetic on every element. Most of the work is done in float32, which is four times as fast. Rounding is
monotonic, so the largest differences are among the elements with the largest rounded difference, and only these
elements are computed again in float64.

This module needs numpy and is imported only if replicas differ.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.tensors.blocks import run_in_shares
from syncheck.tensors.dtypes import DTYPES, DType
from syncheck.tensors.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

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
    # Elements are copied if few differ, if some are not finite, or if a tolerance needs their positions.
    if are_few or finite is not None or not tolerance.exact:
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
    # Without elements, all differences are between numbers that are not finite.
    elif arrays[0].size:
        tolerated = _add_float_differences(
            row,
            arrays,
            indices,
            total,
            tolerance,
            majority,
        )
        if tolerated is not None:
            assert picked is not None, "with a tolerance, elements are picked"
            beyond = differs.copy()
            beyond[picked[tolerated]] = False

    first, last = _find_ends(elements)
    beyond_count = int(np.count_nonzero(_merge_parts(row, beyond)))
    total.add_mismatches(count, beyond_count, start + first, start + last)


def _find_ends(mask: Array) -> tuple[int, int]:
    """Return the first and the last position at which a mask is set. It is set at one position at least."""
    first = int(np.argmax(mask))
    after_last = int(np.argmax(mask[::-1]))
    return first, mask.size - 1 - after_last


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
        # An overflow wraps around to the correct number.
        difference = high.view(np.uint64) - low.view(np.uint64)
        largest = int(np.argmax(difference))
        total.add_absolute(int(difference[largest]), indices[largest])
        magnitudes = np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64))
        # At least 1, so that two zeros have the relative difference 0.
        scale = np.maximum(np.maximum(*magnitudes), 1)
        relative = difference.astype(np.float64) / scale
        total.add_relative(float(relative.max()))


def widen(row: DType, array: Array) -> Array:
    """Convert floats to float32 or float64 without rounding. Complex numbers become their real and imaginary parts."""
    if row.family == "complex":
        parts: Array = array.view(f"float{row.size * 4}")
        return parts

    # A bfloat16 is the upper half of a float32.
    if row.name == "bfloat16":
        bits = array.view(np.uint16)
        return np.left_shift(bits, np.uint32(16), dtype=np.uint32).view(np.float32)

    if row.size < 4:
        return array.astype(np.float32)

    return array


def read_float64(tensor: Tensor, files: Files, start: int, count: int, slot: int) -> Array:
    """Read elements as float64. Complex numbers become their real and imaginary parts."""
    row = DTYPES[tensor.dtype]
    # Converting a signalling NaN is an invalid operation.
    with np.errstate(invalid="ignore"):
        data = files.read(tensor, start, count, slot)
        array = np.frombuffer(data, row.dtype())
        return widen(row, array).astype(np.float64)


def pairs(arrays: Sequence[Array], majority: bool) -> Iterator[tuple[Array, Array]]:
    """Yield pairs (lower, upper) to subtract.

    With a majority, pairs are the first array and each other array; else the lowest and highest value of each element.
    """
    if majority:
        for array in arrays[1:]:
            yield np.minimum(arrays[0], array), np.maximum(arrays[0], array)

        return

    low = np.minimum(arrays[0], arrays[1])
    high = np.maximum(arrays[0], arrays[1])
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
            _add_float32(
                low,
                high,
                indices,
                total,
            )
        else:
            _add_float64(
                low,
                high,
                indices,
                total,
            )

        steps = _count_ulps(row, low, high)
        total.add_ulp(int(steps.max()))
        if tolerated is not None:
            tolerated &= _is_close(
                low,
                high,
                steps,
                tolerance,
            )

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
        low = low.astype(row.dtype())
        high = high.astype(row.dtype())

    # Powers of two without a sign: the bits have the order of the values.
    if row.name == "float8_e8m0fnu":
        return np.subtract(high.view(np.uint8), low.view(np.uint8))

    below = ordered(low)
    above = ordered(high)
    width = above.dtype.itemsize * 8
    steps: Array = np.subtract(above, below, out=above).view(f"uint{width}")
    if row.name == "bfloat16":
        np.right_shift(steps, np.uint32(16), out=steps)

    return steps


def _add_float32(low: Array, high: Array, indices: _ElementIndices, total: Statistics) -> None:
    """Add differences of float32 values. Only candidates for the maximum are computed in float64."""
    difference = high - low
    largest = difference.max()
    if np.isinf(largest):
        _add_float64(
            low.astype(np.float64),
            high.astype(np.float64),
            indices,
            total,
        )
        return

    if total.max_abs is None or largest >= np.float32(total.max_abs):
        candidates = np.flatnonzero(difference == largest)
        exact = high[candidates].astype(np.float64) - low[candidates]
        best = int(np.argmax(exact))
        position = int(candidates[best])
        total.add_absolute(float(exact[best]), indices[position])

    # Since low <= high, the larger magnitude is max(-low, high).
    scale = np.negative(low)
    np.maximum(scale, high, out=scale)
    np.maximum(scale, _TINY, out=scale)
    relative = np.divide(difference, scale, out=difference)
    least = relative.max() * _DOUBT
    if total.max_rel is None or least > total.max_rel * _DOUBT * _DOUBT:
        candidates = np.flatnonzero(relative >= least)
        exact = high[candidates].astype(np.float64) - low[candidates]
        exact_relative = exact / scale[candidates]
        total.add_relative(float(exact_relative.max()))


def _add_float64(low: Array, high: Array, indices: _ElementIndices, total: Statistics) -> None:
    """Add differences of float64 values."""
    difference = high - low
    scale = np.maximum(-low, high)
    np.maximum(scale, np.nextafter(0.0, 1.0), out=scale)
    relative = difference / scale
    # The difference of finite numbers overflows, so divide before subtracting.
    if np.isinf(difference.max()):
        overflows = np.isinf(difference)
        relative_low = low[overflows] / scale[overflows]
        relative_high = high[overflows] / scale[overflows]
        relative[overflows] = np.abs(relative_low - relative_high)
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
        a = low.astype(np.float64)
        b = high.astype(np.float64)
        # The difference of finite numbers may overflow.
        scale = np.where(np.isinf(b - a), 0.25, 1.0)
        a = a * scale
        b = b * scale
        tolerated = tolerance.atol * scale + tolerance.rtol * np.maximum(-a, b)
        close |= b - a <= tolerated

    if tolerance.ulp is not None:
        most_steps = min(tolerance.ulp, np.iinfo(steps.dtype).max)
        close |= steps <= most_steps

    return close
