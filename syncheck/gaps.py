"""By how much do replicas of one tensor differ? One pass over one replica of each cluster of equal bytes.

This is the only part of a comparison that needs numpy; it is imported when a difference was found.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.blocks import Files, ranges
from syncheck.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncheck.records import Extent
    from syncheck.snapshots import Tensor
    from syncheck.tolerance import Tolerance

    Array = NDArray[Any]


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


def measure(tensors: Sequence[Tensor], files: Files, tolerance: Tolerance, *, majority: bool) -> Statistics:
    """Measure the gaps between tensors whose bytes differ, one of each cluster.

    tensors: of one dtype and shape, two or more. majority: whether the first stands for most replicas; then gaps are
    against it, else between the two that lie farthest apart in each element. Floats are subtracted in float64 (complex
    numbers by their parts), integers without overflow. ULP are steps between neighbouring floats of the dtype, with
    0.0 and -0.0 at one place.
    """
    row = DTYPES[tensors[0].dtype]
    total = Statistics(nonfinite=[0] * len(tensors))
    with np.errstate(all="ignore"):
        for start, count in ranges(tensors):
            blocks = [files.read(tensor, start, count, slot) for slot, tensor in enumerate(tensors)]
            arrays = [np.frombuffer(block, row.dtype()) for block in blocks]
            if all(block == blocks[0] for block in blocks[1:]):
                _count_nonfinite(row, arrays[:1], total)
                continue
            _count_nonfinite(row, arrays, total)
            _measure_block(row, arrays, start, total, tolerance, majority)
    return total


def _count_nonfinite(row: DType, arrays: list[Array], total: Statistics) -> None:
    """Add each array's count to its representative's; a single array stands for all."""
    if row.family not in ("float", "complex"):
        return
    counts = [array.size - int(np.count_nonzero(np.isfinite(array))) for array in arrays]
    for i in range(len(total.nonfinite)):
        total.nonfinite[i] += counts[i if len(counts) > 1 else 0]


def _measure_block(
    row: DType, arrays: list[Array], start: int, total: Statistics, tolerance: Tolerance, majority: bool
) -> None:
    parts = 2 if row.family == "complex" else 1
    if parts == 2:
        arrays = [array.view(f"float{row.size * 4}") for array in arrays]
    base = arrays[0]
    differs = np.zeros(base.shape, bool)
    for other in arrays[1:]:
        unequal = other != base
        # NaN is unequal to itself; two NaNs of any payload hold the same value.
        differs |= unequal if row.family in ("int", "uint", "bool") else unequal & ~(np.isnan(other) & np.isnan(base))
    flat = np.flatnonzero(differs)
    if not flat.size:
        return
    elements = np.unique(flat // parts) if parts == 2 else flat
    total.mismatched += int(elements.size)
    total.first = int(elements[0]) + start if total.first is None else total.first
    total.last = int(elements[-1]) + start
    picked = [array[flat] for array in arrays]
    excused = np.zeros(flat.size, bool)
    if row.family in ("float", "complex"):
        finite = np.logical_and.reduce([np.isfinite(array) for array in picked])
        if not finite.all() and not total.worst_nonfinite:
            total.worst, total.worst_nonfinite = int(flat[~finite][0]) // parts + start, True
        where = flat[finite]
        excused[finite] = _float_gaps(
            [array[finite] for array in picked], where // parts + start, total, tolerance, majority
        )
    else:
        _integer_gaps(row, picked, flat + start, total, majority)
    beyond = flat[~excused]
    total.beyond += int(np.unique(beyond // parts).size) if parts == 2 else int(beyond.size)


def _pairs(arrays: list[Array], majority: bool) -> list[tuple[Array, Array]]:
    """Return which arrays to subtract: all others from the first, or per element the lowest from the highest."""
    if majority:
        return [(arrays[0], other) for other in arrays[1:]]
    return [(np.minimum.reduce(arrays), np.maximum.reduce(arrays))]


def _float_gaps(arrays: list[Array], where: Array, total: Statistics, tolerance: Tolerance, majority: bool) -> Array:
    """Take in the gaps of finite elements and return which of them the tolerance excuses."""
    excused = np.ones(where.size, bool)
    if not where.size:
        return excused
    steps = [_ordered(array) for array in arrays]
    for (a, b), (lower, upper) in zip(
        _pairs([array.astype(np.float64) for array in arrays], majority), _pairs(steps, majority), strict=True
    ):
        gap = np.minimum(np.abs(a - b), sys.float_info.max)  # the gap of two finite numbers may overflow
        scale = np.maximum(np.abs(a), np.abs(b))
        # Scaled before subtracting only where the gap overflows: it costs a rounding.
        relative = np.where(gap < sys.float_info.max, gap / scale, np.abs(a / scale - b / scale))
        ulp = np.maximum(lower, upper) - np.minimum(lower, upper)
        at = int(np.argmax(gap))
        _keep(total, float(gap[at]), int(where[at]))
        total.max_rel = max(total.max_rel or 0.0, float(relative.max()))
        total.max_ulp = max(total.max_ulp or 0, int(ulp.max()))
        ok = np.zeros(where.size, bool)
        if tolerance.rtol is not None and tolerance.atol is not None:
            ok |= gap <= tolerance.atol + tolerance.rtol * scale
        if tolerance.ulp is not None:
            ok |= ulp <= tolerance.ulp
        excused &= ok
    return excused


def _integer_gaps(row: DType, arrays: list[Array], where: Array, total: Statistics, majority: bool) -> None:
    signed = row.family == "int"
    # Flipping the sign bit keeps the order and makes every difference fit an unsigned integer.
    flip = np.uint64(1 << 63) if signed else np.uint64(0)
    wide = [array.astype(np.int64 if signed else np.uint64).view(np.uint64) ^ flip for array in arrays]
    for a, b in _pairs(wide, majority):
        low, high = np.minimum(a, b), np.maximum(a, b)
        gap = high - low
        at = int(np.argmax(gap))
        _keep(total, int(gap[at]), int(where[at]))
        scale = np.maximum(
            *(np.abs((x ^ flip).view(np.int64 if signed else np.uint64).astype(np.float64)) for x in (low, high))
        )
        total.max_rel = max(total.max_rel or 0.0, float((gap.astype(np.float64) / scale).max()))


def _keep(total: Statistics, gap: float, where: int) -> None:
    """Keep the greatest gap; of equal ones the first, whichever pair of replicas it came from."""
    greater = total.max_abs is None or gap > total.max_abs
    tied = gap == total.max_abs and total.worst is not None and where < total.worst
    if greater:
        total.max_abs = gap
    if (greater or tied) and not total.worst_nonfinite:
        total.worst = where


def _ordered(array: Array) -> Array:
    """Map finite floats to uint64 so that neighbours are 1 apart and both zeros are equal.

    Bruce Dawson, Comparing Floating Point Numbers (2012): read the bits as sign and magnitude.
    """
    width = array.dtype.itemsize * 8
    bits = array.view(f"uint{width}").astype(np.uint64)
    magnitude = bits & np.uint64((1 << (width - 1)) - 1)
    middle = np.uint64(1 << 63)
    return np.where(bits >> np.uint64(width - 1) != 0, middle - magnitude, middle + magnitude)
