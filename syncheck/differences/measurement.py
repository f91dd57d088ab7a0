"""By how much do replicas of one tensor differ? One pass over one replica of each cluster of equal bytes.

This and what it imports is the only part of a comparison that needs numpy; it is imported when a difference was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.differences.floats import Where, add_float_differences, pairs, widen
from syncheck.differences.statistics import Statistics
from syncheck.dtypes import DTYPES, DType
from syncheck.kernel.shares import run_in_shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor
    from syncheck.tolerance import Tolerance

    Array = NDArray[Any]
    from syncheck.dtypes import DType


def add_integer_differences(
    row: DType, arrays: Sequence[Array], where: Where, total: Statistics, majority: bool
) -> None:
    """Take in the gaps of integers and bools, against the first array or, per element, from the lowest to the highest.

    where: says what elements of the tensor these are.
    """
    kind = np.int64 if row.family == "int" else np.uint64
    for low, high in pairs([array.astype(kind) for array in arrays], majority):
        gap = high.view(np.uint64) - low.view(np.uint64)  # what overflows wraps round, to the right number
        at = int(np.argmax(gap))
        total.keep(int(gap[at]), where[at])
        scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        total.keep_relative(float((gap.astype(np.float64) / np.maximum(scale, 1)).max()))


# glibc gives freed memory back to the system, page by page, unless a larger piece was freed before (mallopt(3),
# M_MMAP_THRESHOLD: it adapts). Without this, half of the time would go into getting the same pages again.
_FREED_FIRST = 8 << 20  # bytes; larger than all temporary arrays of a block together
# Elements that differ are picked from a block where they are fewer than one in so many; else all are measured.
_FEW = 4


def measure_differences(tensors: Sequence[Tensor], files: Files, tolerance: Tolerance, *, majority: bool) -> Statistics:
    """Measure the gaps between tensors whose bytes differ, one of each cluster.

    tensors: of one dtype and shape, two or more. majority: whether the first stands for most replicas; then gaps are
    against it, else between the two that lie farthest apart in each element. A tolerance holds for every pair of
    replicas, so with a tolerance the gaps are always those between the farthest two. Floats are subtracted in float64
    (complex numbers by their parts), integers without overflow. ULP are steps between neighbouring floats of the dtype,
    with 0.0 and -0.0 at one place.
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
                finite = _finite(row, arrays, total)
                if len(arrays) > 1:
                    _measure_block(row, arrays, finite, start, total, tolerance, majority)
        return total

    first, *others = run_in_shares(tensors, files, measure_share)
    for other in others:
        first.add(other)
    return first


def _finite(row: DType, arrays: Sequence[Array], total: Statistics) -> Array | None:
    """Count what is not finite, and return which elements are finite everywhere: None for all.

    A single array stands for all replicas.
    """
    if row.family not in ("float", "complex"):
        return None
    found = [np.isfinite(array) for array in arrays]
    if all(each.all() for each in found):
        return None
    if row.family == "complex":
        counts = [int(np.count_nonzero(~(each[0::2] & each[1::2]))) for each in found]
    else:
        counts = [each.size - int(np.count_nonzero(each)) for each in found]
    for i in range(len(total.nonfinite)):
        total.nonfinite[i] += counts[i if len(counts) > 1 else 0]
    everywhere: Array = np.logical_and.reduce(found)
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
    """Measure one block of replicas that differ in it. finite: elements that are so everywhere, None for all."""
    parts = 2 if row.family == "complex" else 1
    differs = _differs(arrays, finite is None)
    elements = differs[0::2] | differs[1::2] if parts == 2 else differs
    count = int(np.count_nonzero(elements))
    if not count:
        return
    first = start + int(np.argmax(elements))
    last = start + elements.size - 1 - int(np.argmax(elements[::-1]))
    beyond = differs
    if finite is not None and not finite[differs].all():
        total.keep_nonfinite(start + int(np.argmax(differs & ~finite)) // parts)
    picked = None
    if finite is not None or count * _FEW < elements.size or not tolerance.exact:
        picked = np.flatnonzero(differs if finite is None else differs & finite)
        arrays = [array[picked] for array in arrays]
    if not arrays[0].size:
        pass
    elif row.family in ("float", "complex"):
        excused = add_float_differences(row, arrays, Where(start, picked, parts), total, tolerance, majority)
        if excused is not None and picked is not None:
            beyond = differs.copy()
            beyond[picked[excused]] = False
    else:
        add_integer_differences(row, arrays, Where(start, picked), total, majority)
    if parts == 2:
        beyond = beyond[0::2] | beyond[1::2]
    total.mismatch(count, int(np.count_nonzero(beyond)), first, last)


def _differs(arrays: Sequence[Array], finite: bool) -> Array:
    """Return which elements do not hold the same value everywhere; NaNs of any payload hold the same one."""
    differs: Array = arrays[0] != arrays[1]
    for other in arrays[2:]:
        differs |= arrays[0] != other
    if not finite:
        differs &= ~np.logical_and.reduce([np.isnan(array) for array in arrays])
    return differs
