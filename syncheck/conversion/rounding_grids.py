"""Recognize weights that were rounded to the steps of integers and stored as floats ("fake quantization").

Each value of a block, a row or the whole tensor is a multiple of one step from the smallest value of the block, with
at most 255 steps for 8 bits and 15 steps for 4 bits, and within half a step of the original value.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck.conversion.merges import unit_roundoff
from syncheck.conversion.quantized import Quantized
from syncheck.conversion.recognition import get_computed, is_readable
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
# Blocks with fewer values do not show a step.
_LEAST = 16
# Bits that the values show beyond chance; see `factors`.
_LEAST_BITS = 40.0
# Elements that are read at once, and limit of the elements of a whole tensor with one step.
_SAMPLE, _MOST = 1 << 18, 1 << 18
# Rounding of a value to its dtype, and of its distance from the smallest value.
_ROUNDINGS = 1.5
# A step is so many times the rounding at least: floats have steps of their own.
_COARSE = 8.0
# Numbers with few decimals are not quantized: largest distance of the logarithm of their step from an integer.
_DECIMAL = 1e-4
# Largest distance from the original in steps: half a step, and the rounding of the scale.
_HALF = 0.51


def relate_grid(name: str, models: Models) -> dict[str, Relation]:
    """Find the steps of one model, if the other model has the values before they were rounded."""
    for side, tensors, others in (("B", models.b, models.a), ("A", models.a, models.b)):
        rounded, original = tensors[name], others[name]
        if rounded.shape != original.shape or not (is_readable(rounded) and is_readable(original)):
            continue
        # Quantized weights have scales of their own, which may be wrong.
        if any(get_computed(tensor, Quantized) is not None for tensor in (rounded, original)):
            continue
        for length, unit in _list_lengths(rounded):
            grid = _Grid(unit_roundoff(rounded.dtype))
            if all(grid.add(values, before) for values, before in _read(rounded, original, length, models)):
                bits = grid.find_bits()
                if bits:
                    scheme = f"int{bits} with a scale for each {unit}, stored as {rounded.dtype} in {side}"
                    return {name: Relation(RelationKind.QUANTIZED, {"scheme": scheme, "steps": grid.largest})}
    return {}


def _list_lengths(tensor: Tensor) -> Iterator[tuple[int, str]]:
    """Yield possible numbers of values with one step, and the name of this unit."""
    if _LEAST <= tensor.numel <= _MOST:
        yield tensor.numel, "tensor"
    columns = math.prod(tensor.shape[1:])
    if len(tensor.shape) < 2:
        return
    if _LEAST <= columns <= _SAMPLE:
        yield columns, "row"
    for length in _LENGTHS:
        if columns > length and columns % length == 0:
            yield length, f"block of {length}"


def _read(rounded: Tensor, original: Tensor, length: int, models: Models) -> Iterator[tuple[Any, Any]]:
    """Yield blocks of both tensors: (blocks, length)."""
    from syncheck.tensors.differences import read_float64

    # A short first read rejects most tensors.
    start, count = 0, length * max(1, min(_SAMPLE // 64, rounded.numel) // length)
    while start < rounded.numel:
        count = min(count, rounded.numel - start)
        values, before = (
            read_float64(tensor, models.files, start, count, slot).reshape(-1, length)
            for slot, tensor in enumerate((rounded, original))
        )
        yield values, before
        start += count
        count = length * max(1, _SAMPLE // length)


class _Grid:
    """The steps of the blocks of a tensor."""

    def __init__(self, unit: float) -> None:
        """Take the unit roundoff of the values."""
        self._unit = unit
        self._most_steps, self._fewest_steps = 0, max(_MOST_STEPS.values())
        self._bits = 0.0
        self._is_decimal = True
        self.largest = 0.0
        """The largest distance from the original values, in steps."""

    def add(self, values: Any, before: Any) -> bool:
        """Return whether the values of each block are multiples of a step, and near the original values."""
        import numpy as np

        if not (np.isfinite(values).all() and np.isfinite(before).all()):
            return False
        ordered = np.sort(values, 1)
        gaps = np.diff(ordered, axis=1)
        noise = _ROUNDINGS * self._unit * np.abs(values).max(1, keepdims=True)
        # Blocks of equal values have no step, and nothing to explain.
        smallest = np.where(gaps > 2 * noise, gaps, np.inf).min(1, keepdims=True)
        usable = np.isfinite(smallest[:, 0])
        if not usable.any():
            return bool((values == before).all())
        if not (values[~usable] == before[~usable]).all():
            return False
        blocks = _Blocks(values[usable], before[usable], ordered[usable, :1], noise[usable], smallest[usable])
        for multiple in _MULTIPLES:
            blocks.try_steps(multiple)
        if not blocks.fits.all():
            return False
        self._most_steps = max(self._most_steps, blocks.most_steps)
        self._fewest_steps = min(self._fewest_steps, blocks.fewest_steps)
        self._is_decimal = self._is_decimal and blocks.is_decimal
        self.largest = max(self.largest, blocks.largest)
        # Two values show the step and its origin.
        self._bits += float(blocks.bits.sum()) - 2 * float(blocks.bits.max(1).sum())
        return self.largest <= _HALF and self._most_steps <= max(_MOST_STEPS.values())

    def find_bits(self) -> int:
        """Return the bits of the integers; 0 if the steps may be chance."""
        if self._bits <= _LEAST_BITS or self._is_decimal:
            return 0
        bits = next(bits for bits, most in _MOST_STEPS.items() if self._most_steps <= most)
        return bits if self._fewest_steps >= _LEAST_STEPS[bits] else 0


class _Blocks:
    """Blocks of values that may be multiples of a step."""

    def __init__(self, values: Any, before: Any, origin: Any, noise: Any, smallest: Any) -> None:
        """Take arrays of (blocks, length), and of (blocks, 1) for one number of each block.

        values, before: after and before rounding.
        origin: the smallest value.
        noise: the rounding of the largest value.
        smallest: the smallest distance of two values.
        """
        self._values, self._before, self._origin = values, before, origin
        self._noise, self._smallest = noise, smallest
        import numpy as np

        self.fits = np.zeros(len(values), bool)
        """Whether the values of each block are multiples of a step."""
        self.bits = np.zeros_like(values)
        """What each value shows beyond chance."""
        self.most_steps, self.fewest_steps = 0, max(_MOST_STEPS.values())
        """The largest and the smallest number of steps between the smallest and the largest value of a block."""
        self.largest = 0.0
        """The largest distance from the values before rounding, in steps."""
        self.is_decimal = True
        """Whether the step of each block is a power of ten."""

    def try_steps(self, multiple: int) -> None:
        """Try a step for the blocks that have none. multiple: the number of steps of the smallest distance."""
        import numpy as np

        heights = self._values - self._origin
        step = self._smallest / multiple
        # The largest number of steps is off by less than half a step only after the step is computed more precisely.
        for bound in (8, 64, None):
            near = np.ones_like(heights, bool) if bound is None else heights <= (bound + 0.5) * step
            counts = np.round(heights / step)
            products = np.where(near, counts * heights, 0).sum(1, keepdims=True)
            squares = np.where(near, counts * counts, 0).sum(1, keepdims=True)
            step = np.where(squares > 0, products / np.maximum(squares, 1), step)
        counts = np.round(heights / step)
        near = (np.abs(heights - counts * step) <= self._noise).all(1)
        is_coarse = (step >= _COARSE * self._noise)[:, 0]
        fits = near & is_coarse & (counts.max(1) <= max(_MOST_STEPS.values())) & ~self.fits
        if not fits.any():
            return
        self.fits |= fits
        steps = counts[fits].max(1)
        self.most_steps = max(self.most_steps, int(steps.max()))
        self.fewest_steps = min(self.fewest_steps, int(steps.min()))
        distances = np.abs(self._values - self._before) / step
        self.largest = max(self.largest, float(distances[fits].max()))
        powers = np.log10(step[fits])
        self.is_decimal = self.is_decimal and bool((np.abs(powers - np.round(powers)) < _DECIMAL).all())
        # A wide noise accepts any value, which shows nothing.
        shown = np.broadcast_to(np.maximum(np.log2(step / (2 * self._noise)), 0), heights.shape)
        self.bits[fits] = shown[fits]
