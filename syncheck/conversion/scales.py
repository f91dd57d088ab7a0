"""Check whether the scales of a quantized matrix are plausible for the original values.

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

from typing import Any

# Share of the largest number that a block must reach, by bits of integers.
SHARES = {8: 1 / 8, 4: 1 / 4, 2: 1 / 2}
# Scale of blocks of zeros in libraries that avoid a division by 0.
_SCALE_OF_ZEROS = 1.0


def are_plausible(peaks: Any, scales: Any, least_peak: float, *, fitted: bool = False) -> bool:
    """Whether scales fit the original values.

    peaks: the largest original magnitude of each block. scales: of each block. least_peak: the smallest plausible peak
    with a scale of 1. fitted: whether the scales were computed from the original; then one block must reach the peak.
    """
    import numpy as np

    finite = np.isfinite(peaks).all() & np.isfinite(scales).all()
    if not finite:
        return False
    zeros = peaks == 0
    # Only a block of zeros has no need of a scale.
    useless = (scales < 0) | ((scales == 0) & ~zeros)
    if useless.any():
        return False
    # A new matrix of zeros has no values that a scale must fit.
    if zeros.all():
        return bool((scales <= _SCALE_OF_ZEROS).all())
    reached = (peaks >= least_peak * scales) & ~zeros
    if not reached.any():
        return False
    # The other blocks are rounded to zeros, which is right with any step that is usual in this matrix.
    usual_step = np.median(scales[reached])
    largest = scales[reached].max()
    most = np.where(zeros, max(_SCALE_OF_ZEROS, largest), largest)
    small = (peaks < usual_step / 2) & (scales <= most)
    return bool((reached | small | fitted).all())
