"""Quantized weights: integers or 8-bit floats with scales, as compressed-tensors, vLLM and DeepSeek store them.

The value of a stored number q is q * scale; a scale belongs to the whole tensor, a row or a block. Rounding to
nearest moves a value by at most half a step: scale / 2 for integers, and half the distance of neighbouring floats times
the scale for 8-bit floats.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.recognition import is_readable
from syncheck.conversion.scales import SHARES, are_plausible
from syncheck.snapshots import Tensor, contiguous_strides
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.tensors.blocks import Files

_STORED = re.compile(r"(.*\.|)weight(_packed)?")
_SCALES = ("weight_scale", "weight_scale_inv")
_ROWS = 1 << 18  # elements of the rows that are read at once
_INTEGERS = ("int8", "uint8", "int32")
_FLOATS = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}  # bits of the mantissa, smallest normal exponent


@dataclass(frozen=True, slots=True)
class Quantized:
    """The values of a quantized matrix as float32. bits: of each number; smaller numbers are packed into int32.

    scales: (1,) or (rows blocks, columns blocks), float64. unit: unit roundoff of the stored scales.
    """

    stored: Tensor
    shape: tuple[int, int]
    bits: int
    scales: Any
    unit: float
    files: Files
    scheme: str
    fitted: bool = False
    """Whether the scales were computed from the other tensor, because the file has none."""

    @property
    def blocks(self) -> tuple[int, int]:
        """The numbers of rows and columns of the block of a scale."""
        rows, columns = self.scales.shape
        return _find_block(self.shape[0], rows), _find_block(self.shape[1], columns)

    @property
    def least_peak(self) -> float:
        """The smallest plausible value of the largest stored number of a block; see `scales`."""
        if self.stored.dtype in _FLOATS:
            return float(2.0 ** _FLOATS[self.stored.dtype][1])
        return SHARES[self.bits] * float(2 ** (self.bits - 1) - 1)

    def read(self, start: int, count: int) -> tuple[Any, Any]:
        """Return whole rows around elements `start` to `start + count`: values, and the bound of their rounding."""
        import numpy as np

        row, columns = DTYPES[self.stored.dtype], self.shape[1]
        first, last = start // columns, -(-(start + count) // columns)
        width = self.stored.shape[1]
        raw = np.frombuffer(
            self.files.read(self.stored, first * width, (last - first) * width, -get_ident()), row.dtype()
        )
        if self.bits < 8:
            # Low bits first; compressed-tensors adds half of the range to make numbers positive.
            shifts = np.arange(0, 32, self.bits, dtype=np.uint32)
            parts = (raw.view(np.uint32)[:, None] >> shifts) & ((1 << self.bits) - 1)
            numbers = parts.reshape(last - first, -1)[:, :columns].astype(np.float64) - 2 ** (self.bits - 1)
        else:
            numbers = raw.astype(np.float32).astype(np.float64).reshape(last - first, columns)
        block_rows, block_columns = self.blocks
        scales = self.scales[np.arange(first, last) // block_rows][:, np.arange(columns) // block_columns]
        step = np.ones_like(numbers)
        if self.stored.dtype in _FLOATS:
            mantissa, least = _FLOATS[self.stored.dtype]
            exponents = np.floor(np.log2(np.maximum(np.abs(numbers), 2.0**least)))
            step = 2.0 ** (exponents - mantissa)
        return numbers * scales, (step / 2 + np.abs(numbers) * self.unit) * np.abs(scales)

    def __getitem__(self, part: slice) -> bytes:
        import numpy as np

        start, count = part.start // 4, (part.stop - part.start) // 4
        values, _ = self.read(start, count)
        first = start - start // self.shape[1] * self.shape[1]
        return bytes(values.reshape(-1)[first : first + count].astype(np.float32).tobytes())


def dequantize(tensors: Mapping[str, Tensor], other: Mapping[str, Tensor], files: Files) -> Mapping[str, Tensor]:
    """Return the tensors with the values of quantized weights, and without their scales.

    other: the other model. Two models with the same scales are compared as they are stored.
    """
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        match = _STORED.fullmatch(name)
        scale = next((f"{match[1]}{key}" for key in _SCALES if f"{match[1]}{key}" in tensors), "") if match else ""
        if not match or not scale or scale in other:
            continue
        quantized = _open(tensor, tensors[scale], tensors.get(f"{match[1]}weight_shape"), bool(match[2]), files)
        zero = f"{match[1]}weight_zero_point"
        if quantized is None or zero in tensors:
            continue
        used |= {name, scale, *([f"{match[1]}weight_shape"] if match[2] else [])}
        full, shape = f"{match[1]}weight", quantized.shape
        found[full] = Tensor(full, "float32", shape, contiguous_strides(shape), tensor.path, 0, data=quantized)
    return {name: tensor for name, tensor in tensors.items() if name not in used} | found if found else tensors


def _open(tensor: Tensor, scale: Tensor, shape: Tensor | None, packed: bool, files: Files) -> Quantized | None:
    """Return the values of a weight, None for an unknown format."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    known = tensor.dtype in (*_INTEGERS, *_FLOATS) and len(tensor.shape) == 2 and has_elements(tensor)
    if not known or not is_readable(scale) or not 0 < scale.numel <= 1 << 22 or not tensor.numel:
        return None
    full, bits = (tensor.shape[0], tensor.shape[1]), 8
    if packed:
        if tensor.dtype != "int32" or shape is None or not has_elements(shape):
            return None
        if shape.numel != 2 or shape.dtype not in ("int64", "int32"):
            return None
        kind = np.int64 if shape.dtype == "int64" else np.int32
        rows, columns = np.frombuffer(bytes(files.read(shape, 0, 2, 0)), kind).tolist()
        bits = next((n for n in (2, 4) if rows == full[0] and -(-columns * n // 32) == full[1]), 0)
        full = (rows, columns)
        if not bits:
            return None
    elif tensor.dtype == "int32":
        return None
    scales = read_float64(scale, files, 0, scale.numel, 0)
    grid = _find_grid(full, scale.shape)
    if grid is None or not np.isfinite(scales).all():
        return None
    named = f"int{bits}" if tensor.dtype in _INTEGERS else tensor.dtype
    blocks = [_find_block(size, n) for size, n in zip(full, grid, strict=True)]
    each = {(1, 1): "tensor", (full[0], 1): "row"}.get(grid, f"block of {blocks[0]} x {blocks[1]}")
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(scale.dtype, 2.0**-24)
    return Quantized(tensor, full, bits, scales.reshape(grid), unit, files, f"{named} with a scale for each {each}")


def _find_grid(shape: tuple[int, int], scales: Sequence[int]) -> tuple[int, int] | None:
    """Return the numbers of blocks of rows and of columns with one scale each."""
    count = math.prod(scales)
    if count == 1:
        return 1, 1
    if [*scales] in ([shape[0]], [shape[0], 1]):
        return shape[0], 1
    fits = len(scales) == 2 and all(0 < n <= m for n, m in zip(scales, shape, strict=True))
    return (scales[0], scales[1]) if fits else None


def _find_block(size: int, count: int) -> int:
    """Return the length of so many blocks of a dimension; the last block may be shorter if the length is 128."""
    return 128 if -(-size // 128) == count else -(-size // count)


def has_scales(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a model has scales for a tensor, which may be invalid."""
    return any(name.endswith("weight") and f"{name[:-6]}{key}" in tensors for key in _SCALES)


def fit_scales(tensor: Tensor, other: Tensor, files: Files) -> Quantized | None:
    """Return the values of integers without scales: one scale for each row, fitted to another tensor."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    if tensor.dtype not in (*_INTEGERS[:2], *_FLOATS) or len(tensor.shape) != 2 or tensor.shape != other.shape:
        return None
    shape = (tensor.shape[0], tensor.shape[1])
    plain = Quantized(tensor, shape, 8, np.ones((1, 1)), 0.0, files, "")
    scales = np.ones((shape[0], 1))
    step = max(1, (1 << 18) // shape[1])
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        numbers, _ = plain.read(first * shape[1], count * shape[1])
        values = read_float64(other, files, first * shape[1], count * shape[1], 0).reshape(count, -1)
        with np.errstate(all="ignore"):
            fitted = (numbers * values).sum(1) / (numbers * numbers).sum(1)
        scales[first : first + count, 0] = np.where(np.isfinite(fitted), fitted, 0.0)
    named = f"int{DTYPES[tensor.dtype].size * 8}" if tensor.dtype in _INTEGERS else tensor.dtype
    # Fitted scales are not exact: by up to 1.6 % for 8-bit floats, and 0.2 % for integers.
    scheme = f"{named}, with scales fitted to A by row, because the file has no scales"
    unit = 2.0**-6 if tensor.dtype in _FLOATS else 2.0**-9
    return replace(plain, scales=scales, unit=unit, scheme=scheme, fitted=True)


class Rounding(NamedTuple):
    """The difference between a quantized matrix and the original.

    largest: in units of the bound of rounding, which is half a step. plausible: whether the scales are plausible.
    """

    largest: float
    plausible: bool


def measure_rounding(quantized: Quantized, other: Tensor, files: Files) -> Rounding:
    """Compare a quantized matrix with the original, a tensor of equal shape."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

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
