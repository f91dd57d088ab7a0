"""Measure differences between finite floats of every width: absolute, relative, and in ULPs of the dtype.

The results equal float64 arithmetic on every element. Most of the work is done in float32, which is four times
as fast. Rounding is monotonic, so the largest differences are among those with the largest rounded difference, and
only these elements are computed again in float64.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncheck.differences.statistics import Statistics
    from syncheck.dtypes import DType
    from syncheck.tolerance import Tolerance

    Array = NDArray[Any]

# Relative differences in float32 are rounded twice; if their ratio is above this bound, their order is uncertain.
_DOUBT = np.float32(1 - 2.0**-21)
# The smallest positive float32: avoids 0 / 0 = NaN and changes no other quotient.
_TINY = np.float32(2.0**-149)


def widen(row: DType, array: Array) -> Array:
    """Convert floats to float32 or float64 without rounding. Complex numbers become their real and imaginary parts."""
    if row.family == "complex":
        parts: Array = array.view(f"float{row.size * 4}")
        return parts
    if row.name == "bfloat16":  # the upper half of a float32
        return np.left_shift(array.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)
    return array if row.size >= 4 else array.astype(np.float32)


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


def add_float_differences(
    row: DType,
    arrays: Sequence[Array],
    indices: ElementIndices,
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
        total.add_ulp(int(steps.max()))
        if tolerated is not None:
            tolerated &= _is_close(low, high, steps, tolerance)
    return tolerated


class ElementIndices:
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


def _add_float32(low: Array, high: Array, indices: ElementIndices, total: Statistics) -> None:
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


def _add_float64(low: Array, high: Array, indices: ElementIndices, total: Statistics) -> None:
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
