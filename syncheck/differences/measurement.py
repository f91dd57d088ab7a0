"""Measure the differences between replicas of one tensor, in one pass over one replica of each cluster.

This package needs numpy and is imported only if replicas differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.differences.floats import ElementIndices, add_float_differences, pairs, widen
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

# glibc keeps freed memory only after a larger block has been freed (mallopt(3), M_MMAP_THRESHOLD is dynamic). Without
# this, half of the time is spent on page faults.
_FREED_FIRST = 8 << 20  # bytes; more than all temporary arrays of a block
# If fewer than one in this many elements differ, they are copied out of the block before they are measured.
_FEW = 4


def add_integer_differences(
    row: DType, arrays: Sequence[Array], indices: ElementIndices, total: Statistics, majority: bool
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
    differs = _differs(arrays, finite is None)
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
    if not arrays[0].size:
        pass
    elif row.family in ("float", "complex"):
        tolerated = add_float_differences(row, arrays, ElementIndices(start, picked, parts), total, tolerance, majority)
        if tolerated is not None and picked is not None:
            beyond = differs.copy()
            beyond[picked[tolerated]] = False
    else:
        add_integer_differences(row, arrays, ElementIndices(start, picked), total, majority)
    if parts == 2:
        beyond = beyond[0::2] | beyond[1::2]
    total.add_mismatches(count, int(np.count_nonzero(beyond)), first, last)


def _differs(arrays: Sequence[Array], finite: bool) -> Array:
    """Return a mask of elements whose values differ. NaNs are equal to each other, whatever their payloads."""
    differs: Array = arrays[0] != arrays[1]
    for other in arrays[2:]:
        differs |= arrays[0] != other
    if not finite:
        differs &= ~np.logical_and.reduce([np.isnan(array) for array in arrays])
    return differs
