"""Measure the rounding of a quantized matrix, and whether its scales are plausible for the original values.

Within half a step is no evidence if the step is too large: with a scale of 1e30, every value is within half a step of
0. A scale is plausible if it is positive and the largest original value of its block reaches

- for integers, 1/8 of the largest number of 8 bits (127), 1/4 of 4 bits (7), and 1/2 of 2 bits (1);
- for 8-bit floats, the smallest normal number, below which they have no precision left.

Quantizers by the largest value use the whole range, with scales that are powers of two more than half of it, and less
with one scale for several fused matrices. benchmarks/quantization_scales.py simulates them. The shares were chosen on
even seeds. On odd seeds, all of 20,000 correctly quantized matrices are plausible, and none of 32,000 with scales that
round a block to 0, or are infinite, NaN, negative, zero or uninitialized.

A block whose original values are all below half a step of the other blocks is stored as zeros with any small scale.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from syncheck.conversion.quantized import Quantized
    from syncheck.kernel.blocks import Files
    from syncheck.snapshots import Tensor

# Share of the largest number that a block must reach, by bits of integers.
SHARES = {8: 1 / 8, 4: 1 / 4, 2: 1 / 2}
# Scale of blocks of zeros in libraries that avoid a division by 0.
_SCALE_OF_ZEROS = 1.0
_ROWS = 1 << 18  # elements of the rows that are read at once


class Rounding(NamedTuple):
    """The difference between a quantized matrix and the original.

    largest: in units of the bound of rounding, which is half a step. plausible: whether the scales are plausible.
    """

    largest: float
    plausible: bool


def measure_rounding(quantized: Quantized, other: Tensor, files: Files) -> Rounding:
    """Compare a quantized matrix with the original, a tensor of equal shape."""
    import numpy as np

    from syncheck.differences import read_float64

    rows, columns = quantized.shape
    block_rows, block_columns = quantized.blocks
    starts = np.arange(0, columns, block_columns)
    peaks = np.zeros(quantized.scales.shape)
    step, largest = max(1, _ROWS // columns), 0.0
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(other.dtype, 2.0**-24)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values, bound = quantized.read(first * columns, count * columns)
        original = read_float64(other, files, first * columns, count * columns, 0).reshape(count, columns)
        sizes = np.abs(original)
        with np.errstate(all="ignore"):
            ratios = np.abs(values - original) / (bound + unit * sizes + 1e-30)
        # A NaN or an infinity is not within half a step of anything.
        largest = max(largest, float(np.nan_to_num(ratios, nan=np.inf).max()))
        np.maximum.at(peaks, np.arange(first, first + count) // block_rows, np.maximum.reduceat(sizes, starts, axis=1))
    return Rounding(largest, are_plausible(peaks, quantized.scales, quantized.least_peak, fitted=quantized.fitted))


def are_plausible(peaks: Any, scales: Any, least_peak: float, *, fitted: bool = False) -> bool:
    """Whether scales fit the original values.

    peaks: the largest original magnitude of each block. scales: of each block. least_peak: the smallest plausible peak
    with a scale of 1. fitted: whether the scales were computed from the original; then one block must reach the peak.
    """
    import numpy as np

    if not np.isfinite(peaks).all() or not np.isfinite(scales).all() or (scales < 0).any():
        return False
    zeros = peaks == 0
    if (scales[~zeros] == 0).any():
        return False
    reached = (peaks >= least_peak * scales) & ~zeros
    if fitted or zeros.all():
        return bool(reached.any() or (zeros.all() and (scales <= _SCALE_OF_ZEROS).all()))
    if not reached.any():
        return False
    # Other blocks are zeros with any step that is usual in this matrix.
    usual, top = float(np.median(scales[reached])), float(scales[reached].max())
    small = (peaks < usual / 2) & (scales <= max(_SCALE_OF_ZEROS if zeros.any() else 0.0, top))
    return bool((reached | small).all())
