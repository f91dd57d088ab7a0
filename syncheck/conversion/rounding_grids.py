"""Recognize weights that were rounded to the steps of integers and stored as floats ("fake quantization").

Each value of a block, a row or the whole tensor is a multiple of one step from the smallest value of the block, with
at most 255 steps for 8 bits and 15 steps for 4 bits, and within half a step of the original value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import unit_roundoff
from syncheck.conversion.quantized import Quantized
from syncheck.conversion.recognition import are_finite, get_computed
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor

# Steps between the smallest and the largest value, by bits.
_MOST_STEPS = {4: 15, 8: 255}
# Steps that each block uses at least, by bits. With fewer steps, its scale is wrong, or its values are lost.
_LEAST_STEPS = {4: 7, 8: 31}
# Lengths of the blocks of a row with one step each.
_LENGTHS = (256, 128, 64, 32)
# The smallest distance of two values may be so many steps.
_MULTIPLES = range(1, 9)
# Numbers of steps from which a step is computed at first.
_SMALL = 16
# Blocks with fewer values do not show a step.
_LEAST = 16
# Bits that the values show beyond chance; see `factors`.
_LEAST_BITS = 40.0
# Elements that are read at once, and limit of the elements of a whole tensor with one step.
_SAMPLE, _MOST = 1 << 18, 1 << 18
# Rounding of a value, of the smallest value, and of their distance.
_ROUNDINGS = 3
# A step is so many times the rounding at least: floats have steps of their own.
_COARSE = 5.0
# Numbers with few decimals are not quantized: largest distance of the logarithm of their step from an integer.
_DECIMAL = 1e-4
# Largest distance from the original in steps: half a step, and the rounding of the scale.
_HALF = 0.51


def relate_grid(name: str, models: Models) -> dict[str, Relation]:
    """Find the steps of one model, if the other model has the values before they were rounded."""
    a, b = models.a[name], models.b[name]
    # Quantized weights have scales of their own, which may be wrong.
    if any(get_computed(tensor, Quantized) is not None for tensor in (a, b)):
        return {}
    for side, rounded, original in (("B", b, a), ("A", a, b)):
        for length, unit in _list_lengths(rounded):
            grid = _Grid(unit_roundoff(rounded.dtype))
            blocks = _read(rounded, original, length, models)
            fits = all(grid.add(values, before) for values, before in blocks)
            bits = grid.find_bits() if fits else 0
            if bits:
                scheme = f"int{bits} with a scale for each {unit}, stored as {rounded.dtype} in {side}"
                return {name: Relation(RelationKind.QUANTIZED, {"scheme": scheme, "steps": grid.largest})}
    return {}


def _list_lengths(tensor: Tensor) -> list[tuple[int, str]]:
    """Return possible numbers of values with one step, and the name of this unit."""
    lengths = []
    if _LEAST <= tensor.numel <= _MOST:
        lengths.append((tensor.numel, "tensor"))
    # A vector has no rows: each of its elements would be a row.
    columns = math.prod(tensor.shape[1:])
    if _LEAST <= columns <= _SAMPLE:
        lengths.append((columns, "row"))
    block_lengths = [length for length in _LENGTHS if columns > length and columns % length == 0]
    lengths += [(length, f"block of {length}") for length in block_lengths]
    return lengths


def _read(rounded: Tensor, original: Tensor, length: int, models: Models) -> Iterator[tuple[Any, Any]]:
    """Yield blocks of both tensors: (blocks, length)."""
    from syncheck.tensors.differences import read_float64

    # A short first read rejects most tensors.
    start, count = 0, length * max(1, min(_SAMPLE // 64, rounded.numel) // length)
    while start < rounded.numel:
        count = min(count, rounded.numel - start)
        values = read_float64(rounded, models.files, start, count, 0)
        before = read_float64(original, models.files, start, count, 1)
        yield values.reshape(-1, length), before.reshape(-1, length)
        start += count
        count = length * max(1, _SAMPLE // length)


class _Grid:
    """The steps of the blocks of a tensor."""

    def __init__(self, unit: float) -> None:
        """Take the unit roundoff of the values."""
        self._unit = unit
        self._most_steps, self._fewest_steps = 0, _MOST_STEPS[8]
        self._bits = 0.0
        self._is_decimal = True
        self.largest = 0.0
        """The largest distance from the original values, in steps."""

    def add(self, values: Any, before: Any) -> bool:
        """Return whether the values of each block are multiples of a step, and near the original values."""
        import numpy as np

        if not are_finite(values, before):
            return False
        noise = _ROUNDINGS * self._unit * np.abs(values).max(1, keepdims=True)
        ordered = np.sort(values, 1)
        gaps = np.diff(ordered, axis=1)
        is_level = gaps > 2 * noise
        # Blocks of equal values have no step, and nothing to explain.
        usable = is_level.any(1)
        if not (values[~usable] == before[~usable]).all():
            return False
        if not usable.any():
            return True
        if is_level.sum(1).max() > _MOST_STEPS[8]:
            return False
        values, before, noise = values[usable], before[usable], noise[usable]
        # Most values are near the median, so that small numbers of steps show the step precisely.
        middle = values.shape[1] // 2
        heights = values - ordered[usable, middle : middle + 1]
        steps = _fit_steps(heights, noise, _measure_gaps(gaps[usable], is_level[usable]))
        if np.isnan(steps).any():
            return False
        distances = np.abs(values - before)
        ranges = ordered[usable, -1:] - ordered[usable, :1]
        self._count(
            np.round(ranges / steps),
            steps,
            noise,
            values.shape[1],
        )
        self.largest = max(self.largest, float((distances / steps).max()))
        return bool((distances <= _HALF * steps + noise).all())

    def _count(self, counts: Any, steps: Any, noise: Any, length: int) -> None:
        """Add the blocks to the evidence. counts: the number of steps of each block. length: values of a block."""
        import numpy as np

        self._most_steps = max(self._most_steps, int(counts.max()))
        self._fewest_steps = min(self._fewest_steps, int(counts.min()))
        powers = np.log10(steps)
        self._is_decimal = self._is_decimal and bool((np.abs(powers - np.round(powers)) < _DECIMAL).all())
        # Two values show the step and its origin.
        self._bits += float(np.log2(steps / (2 * noise)).sum()) * (length - 2)

    def find_bits(self) -> int:
        """Return the bits of the integers; 0 if the steps may be chance."""
        if self._bits <= _LEAST_BITS or self._is_decimal:
            return 0
        bits = next(bits for bits, most in _MOST_STEPS.items() if self._most_steps <= most)
        return bits if self._fewest_steps >= _LEAST_STEPS[bits] else 0


def _measure_gaps(gaps: Any, is_level: Any) -> Any:
    """Return the mean of the smallest gaps between the values of each block. is_level: gaps above rounding."""
    import numpy as np

    smallest = np.where(is_level, gaps, np.inf).min(1, keepdims=True)
    is_small = is_level & (gaps < 1.5 * smallest)
    return np.where(is_small, gaps, 0).sum(1, keepdims=True) / is_small.sum(1, keepdims=True)


def _fit_steps(heights: Any, noise: Any, gaps: Any) -> Any:
    """Return the step of each block; NaN without a step.

    heights: the distances of the values from the median of their block.
    noise: the rounding of the values of each block.
    gaps: the smallest distance of two values of each block.
    """
    import numpy as np

    steps = np.full_like(gaps, np.nan)
    for multiple in _MULTIPLES:
        missing = np.isnan(steps[:, 0])
        if not missing.any():
            break
        steps[missing] = _try_steps(heights[missing], noise[missing], gaps[missing] / multiple)
    return steps


def _try_steps(heights: Any, noise: Any, steps: Any) -> Any:
    """Return steps that fit all values of their block, computed more precisely, and NaN for other blocks."""
    import numpy as np

    # A large number of steps is right only after the step is fitted to small numbers.
    for most in (_SMALL, math.inf):
        counts = np.round(heights / steps)
        used = np.where(np.abs(counts) <= most, counts, 0)
        squares = (used * used).sum(1, keepdims=True)
        steps = np.where(squares > 0, (used * heights).sum(1, keepdims=True) / np.maximum(squares, 1), steps)
    counts = np.round(heights / steps)
    fits = (np.abs(heights - counts * steps) <= noise).all(1, keepdims=True)
    fits &= np.ptp(counts, axis=1, keepdims=True) <= _MOST_STEPS[8]
    # A wide noise accepts any value, which shows nothing.
    fits &= steps >= _COARSE * noise
    return np.where(fits, steps, np.nan)
