"""Gaps between finite floats of every width: absolute, relative, and in steps of the dtype.

The answer is that of float64 arithmetic on every element. Nearly all of the work is done in float32, four times as
fast: its rounding keeps the order of gaps, so the greatest are among those whose rounded gaps are greatest, and only
these few are computed again in float64.
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

# Two relative gaps in float32, each rounded twice, are in doubt where they lie closer than this; with room to spare.
_DOUBT = np.float32(1 - 2.0**-21)
# The smallest positive float32: keeps 0 / 0 from being NaN and changes no other quotient.
_TINY = np.float32(2.0**-149)


def widen(row: DType, array: Array) -> Array:
    """Return floats as float32, float64 where they need it, complex numbers as their parts; no value changes."""
    if row.family == "complex":
        parts: Array = array.view(f"float{row.size * 4}")
        return parts
    if row.name == "bfloat16":  # the upper half of a float32
        return np.left_shift(array.view(np.uint16), np.uint32(16), dtype=np.uint32).view(np.float32)
    return array if row.size >= 4 else array.astype(np.float32)


def pairs(arrays: Sequence[Array], majority: bool) -> Iterator[tuple[Array, Array]]:
    """Give what to subtract as (lower, upper): the first with each other, or per element the lowest and the highest."""
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
    row: DType, arrays: Sequence[Array], where: Where, total: Statistics, tolerance: Tolerance, majority: bool
) -> Array | None:
    """Take in the gaps of finite elements; return which the tolerance excuses, None where it excuses nothing.

    arrays: widen. where: says what elements of the tensor these are.
    """
    excused = None if tolerance.exact else np.ones(arrays[0].size, bool)
    for low, high in pairs(arrays, majority):
        (_keep_gaps if low.dtype == np.float32 else _keep_wide_gaps)(low, high, where, total)
        steps = _steps(row, low, high)
        total.keep_ulp(int(steps.max()))
        if excused is not None:
            excused &= _is_close(low, high, steps, tolerance)
    return excused


class Where:
    """The places in a tensor of elements that stand next to each other in an array.

    start: the block's first element. picked: which were picked from the block, None for all. parts: numbers to an
    element: two of a complex one.
    """

    def __init__(self, start: int, picked: Array | None = None, parts: int = 1) -> None:
        self._start, self._picked, self._parts = start, picked, parts

    def __getitem__(self, at: int) -> int:
        """Return the flat index of the element that stands at `at`."""
        return self._start + (at if self._picked is None else int(self._picked[at])) // self._parts


def ordered(array: Array) -> Array:
    """Map finite floats to integers of their width so that neighbours are 1 apart and both zeros are 0.

    Bruce Dawson, Comparing Floating Point Numbers (2012): read the bits as sign and magnitude.
    """
    kind = np.dtype(f"int{array.dtype.itemsize * 8}")
    bits: Array = array.view(kind)
    negative = bits >> kind.type(kind.itemsize * 8 - 1)  # -1 or 0
    result: Array = np.bitwise_and(negative, np.iinfo(kind).max)
    np.bitwise_xor(bits, result, out=result)
    np.subtract(result, negative, out=result)
    return result


def _steps(row: DType, low: Array, high: Array) -> Array:
    """Return how many steps of the dtype lie between floats: without a sign, so that it fits."""
    if row.size < 4 and row.name != "bfloat16":
        low, high = low.astype(row.dtype()), high.astype(row.dtype())
    if row.name == "float8_e8m0fnu":  # powers of two without a sign: the bits are in order
        return np.subtract(high.view(np.uint8), low.view(np.uint8))
    below, above = ordered(low), ordered(high)
    steps: Array = np.subtract(above, below, out=above).view(f"uint{above.dtype.itemsize * 8}")
    return np.right_shift(steps, np.uint32(16), out=steps) if row.name == "bfloat16" else steps


def _keep_gaps(low: Array, high: Array, where: Where, total: Statistics) -> None:
    """Take in the gaps of float32, computed in float64 only where they may be the greatest."""
    gap = high - low
    top = gap.max()
    if np.isinf(top):
        _keep_wide_gaps(low.astype(np.float64), high.astype(np.float64), where, total)
        return
    if total.max_abs is None or top >= np.float32(total.max_abs):
        at = np.flatnonzero(gap == top)
        exact = high[at].astype(np.float64) - low[at]
        best = int(np.argmax(exact))
        total.keep(float(exact[best]), where[int(at[best])])
    # The higher is the greater in magnitude, or minus the lower is.
    scale = np.negative(low)
    np.maximum(scale, high, out=scale)
    np.maximum(scale, _TINY, out=scale)
    relative = np.divide(gap, scale, out=gap)
    least = relative.max() * _DOUBT
    if total.max_rel is None or least > total.max_rel * _DOUBT * _DOUBT:
        at = np.flatnonzero(relative >= least)
        total.keep_relative(float(((high[at].astype(np.float64) - low[at]) / scale[at]).max()))


def _keep_wide_gaps(low: Array, high: Array, where: Where, total: Statistics) -> None:
    gap = high - low
    scale = np.maximum(-low, high)
    np.maximum(scale, np.nextafter(0.0, 1.0), out=scale)
    relative = gap / scale
    top = float(gap.max())
    if top == float("inf"):  # the gap of two finite numbers may overflow: halve them first, which costs a rounding
        over = np.isinf(gap)
        relative[over] = np.abs(low[over] / scale[over] - high[over] / scale[over])
        np.minimum(gap, sys.float_info.max, out=gap)
    best = int(np.argmax(gap))
    total.keep(float(gap[best]), where[best])
    total.keep_relative(float(relative.max()))


def _is_close(low: Array, high: Array, steps: Array, tolerance: Tolerance) -> Array:
    """Return which pairs the tolerance covers.

    low and high are the extremes of all replicas: if these two are close, every pair between them is. With low <= a <=
    b <= high and rtol <= 1, b - a - rtol * max(|a|, |b|) is min(b - (1 - rtol) * a, (1 - rtol) * b - a), which grows
    with b and falls with a; steps of the dtype grow and fall in the same way.
    """
    close = np.zeros(low.size, bool)
    if tolerance.rtol is not None and tolerance.atol is not None:
        a, b = low.astype(np.float64), high.astype(np.float64)
        scale = np.where(np.isinf(b - a), 0.25, 1.0)  # the gap of two finite numbers may overflow
        a, b = a * scale, b * scale
        close |= b - a <= tolerance.atol * scale + tolerance.rtol * np.maximum(-a, b)
    if tolerance.ulp is not None:
        close |= steps <= min(tolerance.ulp, np.iinfo(steps.dtype).max)
    return close
