"""Quantized weights: integers or 8-bit floats with scales, as compressed-tensors, vLLM and DeepSeek store them.

The value of a stored number q is q * scale; a scale belongs to the whole tensor, a row or a block. Rounding to
nearest moves a value by at most half a step: scale / 2 for integers, and half the distance of neighbouring floats times
the scale for 8-bit floats.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.recognition import get_computed, is_readable
from syncheck.conversion.scales import SHARES, are_plausible
from syncheck.findings import Relation, RelationKind
from syncheck.frozen import record
from syncheck.snapshots import Tensor, contiguous_strides
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.tensors.blocks import Files

_STORED = re.compile(r"(.*\.|)weight(_packed)?")
_SCALES = ("weight_scale", "weight_scale_inv")
_ROWS = 1 << 18  # elements of the rows that are read at once
_INTEGERS = ("int8", "uint8", "int32")
_PACKED_DTYPES = ("int32",)
# Largest difference of a quantized value, relative to half a step and the rounding of its scale.
MOST_ROUNDING = 1.001
# Largest number of scales of a weight.
_MOST_SCALES = 1 << 22
# The formats of the two numbers in a stored shape.
_SHAPE_DTYPES = {"int64": "=2q", "int32": "=2i"}
# The unit roundoff of dtypes with less than single precision.
_UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
_SINGLE = 2.0**-24
_FLOATS = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}  # bits of the mantissa, smallest normal exponent
# The dtypes of one number for each element of a weight.
_PLAIN_DTYPES = ("int8", "uint8", *_FLOATS)


@record
class Quantized:
    """The values of a quantized matrix as float32."""

    numbers: Tensor
    """The stored numbers."""
    shape: tuple[int, int]
    """The numbers of rows and columns."""
    bits: int
    """The bits of each number. Numbers of less than 8 bits are packed into int32."""
    scales: Any
    """The scale of each block: (blocks of rows, blocks of columns), float64."""
    unit: float
    """The unit roundoff of the stored scales."""
    files: Files
    scheme: str
    """The quantization in words."""
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
        if self.numbers.dtype in _FLOATS:
            return float(2.0 ** _FLOATS[self.numbers.dtype][1])
        return SHARES[self.bits] * float(2 ** (self.bits - 1) - 1)

    def read(self, start: int, count: int) -> tuple[Any, Any]:
        """Return whole rows around elements `start` to `start + count`: values, and the bound of their rounding."""
        import numpy as np

        columns = self.shape[1]
        first, last = start // columns, -(-(start + count) // columns)
        numbers = self._read_numbers(first, last)
        block_rows, block_columns = self.blocks
        scales = self.scales[np.arange(first, last) // block_rows][:, np.arange(columns) // block_columns]
        step = np.ones_like(numbers)
        if self.numbers.dtype in _FLOATS:
            mantissa, least = _FLOATS[self.numbers.dtype]
            exponents = np.floor(np.log2(np.maximum(np.abs(numbers), 2.0**least)))
            step = 2.0 ** (exponents - mantissa)
        # The product of 0 and an infinite scale is NaN.
        with np.errstate(invalid="ignore"):
            return numbers * scales, (step / 2 + np.abs(numbers) * self.unit) * np.abs(scales)

    def _read_numbers(self, first: int, last: int) -> Any:
        """Return the numbers of rows `first` to `last` without their scales, as float64."""
        import numpy as np

        count, columns = last - first, self.shape[1]
        width = self.numbers.shape[1]
        # A comparison of two tensors uses slots from 0 on in each of its threads.
        data = self.files.read(self.numbers, first * width, count * width, -get_ident())
        numbers = np.frombuffer(data, DTYPES[self.numbers.dtype].dtype())
        if self.bits == 8:
            return numbers.astype(np.float32).astype(np.float64).reshape(count, columns)
        # Low bits first; compressed-tensors adds half of the range to make numbers positive.
        shifts = np.arange(0, 32, self.bits, dtype=np.uint32)
        parts = (numbers.view(np.uint32)[:, None] >> shifts) & ((1 << self.bits) - 1)
        return parts.reshape(count, -1)[:, :columns].astype(np.float64) - 2 ** (self.bits - 1)

    def __getitem__(self, part: slice) -> bytes:
        import numpy as np

        start, count = part.start // 4, (part.stop - part.start) // 4
        values, _ = self.read(start, count)
        first = start - start // self.shape[1] * self.shape[1]
        selected = values.reshape(-1)[first : first + count]
        # A value beyond float32 is infinite.
        with np.errstate(over="ignore"):
            return bytes(selected.astype(np.float32).tobytes())


def dequantize(tensors: Mapping[str, Tensor], partner: Mapping[str, Tensor], files: Files) -> Mapping[str, Tensor]:
    """Return the tensors with the values of quantized weights, and without their scales.

    partner: the other model. Two models with the same scales are compared as they are stored.
    """
    weights: dict[str, Tensor] = {}
    replaced_names: set[str] = set()
    for name in tensors:
        source = _find_source(name, tensors, partner)
        if source is None:
            continue
        quantized = source.open(files)
        if quantized is not None:
            weights[source.name] = _make_weight(source.name, quantized, source.numbers.path)
            replaced_names |= source.stored_names
    if not weights:
        return tensors
    remaining = {name: tensor for name, tensor in tensors.items() if name not in replaced_names}
    return remaining | weights


class _Source(NamedTuple):
    """The tensors of a file that may be a quantized weight."""

    name: str
    """The name of the weight."""
    numbers: Tensor
    """The stored numbers."""
    scales: Tensor
    """The stored scales."""
    shape: Tensor | None
    """The shape of a weight of packed numbers; None for other weights, and if the file lacks it."""
    stored_names: set[str]
    """The names of the tensors in the file."""
    is_packed: bool
    """Whether each stored number has several numbers of the weight."""

    def open(self, files: Files) -> Quantized | None:
        """Return the values of the weight; None for an unknown format."""
        if self.is_packed:
            return _open_packed(self.numbers, self.scales, self.shape, files)
        return _open_plain(self.numbers, self.scales, files)


def _find_source(name: str, tensors: Mapping[str, Tensor], partner: Mapping[str, Tensor]) -> _Source | None:
    """Return the tensors of a weight whose numbers have this name; None for a name of other tensors.

    partner: the other model, which has no scales of this name.
    """
    match = _STORED.fullmatch(name)
    if match is None:
        return None
    prefix, packed = match.groups(default="")
    scale_name = _find_scale(prefix, tensors)
    if scale_name is None or scale_name in partner:
        return None
    # Zero points shift the numbers, which no format here does.
    if f"{prefix}weight_zero_point" in tensors:
        return None
    # Only packed numbers need a shape.
    shape_names = {f"{prefix}weight_shape"} if packed else set()
    return _Source(
        f"{prefix}weight",
        numbers=tensors[name],
        scales=tensors[scale_name],
        shape=tensors.get(f"{prefix}weight_shape"),
        stored_names={name, scale_name, *shape_names},
        is_packed=packed != "",
    )


def _find_scale(prefix: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the scales of a weight. prefix: the name of the weight without its last part."""
    for suffix in _SCALES:
        if f"{prefix}{suffix}" in tensors:
            return f"{prefix}{suffix}"
    return None


def _make_weight(name: str, quantized: Quantized, path: str) -> Tensor:
    """Return a tensor of the values of a quantized weight."""
    shape = quantized.shape
    return Tensor(
        name,
        dtype="float32",
        shape=shape,
        strides=contiguous_strides(shape),
        path=path,
        offset=0,
        data=quantized,
    )


def _open_plain(tensor: Tensor, scale: Tensor, files: Files) -> Quantized | None:
    """Return the values of a weight of one number for each element; None for an unknown format."""
    if not _is_matrix(tensor, _PLAIN_DTYPES):
        return None
    rows, columns = tensor.shape
    return _add_scales(
        tensor,
        shape=(rows, columns),
        bits=8,
        scale=scale,
        files=files,
    )


def _open_packed(tensor: Tensor, scale: Tensor, shape: Tensor | None, files: Files) -> Quantized | None:
    """Return the values of a weight of several numbers in each int32; None for an unknown format.

    shape: the stored shape of the weight.
    """
    if not _is_matrix(tensor, _PACKED_DTYPES):
        return None
    stored_shape = _read_shape(shape, files)
    if stored_shape is None:
        return None
    rows, columns = stored_shape
    for bits in (2, 4):
        packed_columns = -(-columns * bits // 32)
        if tensor.shape == (rows, packed_columns):
            return _add_scales(
                tensor,
                shape=stored_shape,
                bits=bits,
                scale=scale,
                files=files,
            )
    return None


def _read_shape(shape: Tensor | None, files: Files) -> tuple[int, int] | None:
    """Return the stored numbers of rows and columns of a weight; None for a missing or invalid shape."""
    if shape is None or not has_elements(shape):
        return None
    if shape.numel != 2 or shape.dtype not in _SHAPE_DTYPES:
        return None
    data = bytes(files.read(shape, 0, 2, 0))
    # A matrix has two dimensions.
    rows, columns = struct.unpack(_SHAPE_DTYPES[shape.dtype], data)
    return rows, columns


def _is_matrix(tensor: Tensor, dtypes: Collection[str]) -> bool:
    """Whether a tensor is a matrix of a given dtype."""
    if tensor.dtype not in dtypes or not has_elements(tensor):
        return False
    # A matrix without rows has no values that a scale could fit.
    return len(tensor.shape) == 2 and tensor.numel > 0


def _add_scales(tensor: Tensor, shape: tuple[int, int], bits: int, scale: Tensor, files: Files) -> Quantized | None:
    """Return the values of a weight of this shape; None for unfit scales. They may be NaN or infinite."""
    from syncheck.tensors.differences import read_float64

    # The scales are read as a whole.
    if not is_readable(scale) or not 0 < scale.numel <= _MOST_SCALES:
        return None
    scales = read_float64(scale, files, 0, scale.numel, 0)
    grid = _find_grid(shape, scale.shape)
    if grid is None:
        return None
    number = f"int{bits}" if tensor.dtype in _INTEGERS else tensor.dtype
    return Quantized(
        tensor,
        shape,
        bits,
        scales=scales.reshape(grid),
        unit=_UNITS.get(scale.dtype, _SINGLE),
        files=files,
        scheme=f"{number} with a scale for each {_name_block(shape, grid)}",
    )


def _name_block(shape: tuple[int, int], grid: tuple[int, int]) -> str:
    """Return the name of a part of a matrix with one scale. grid: the numbers of blocks."""
    if grid == (shape[0], 1):
        return "row"
    if grid == (1, 1):
        return "tensor"
    return f"block of {_find_block(shape[0], grid[0])} x {_find_block(shape[1], grid[1])}"


def _find_grid(shape: tuple[int, int], scales: Sequence[int]) -> tuple[int, int] | None:
    """Return the numbers of blocks of rows and of columns with one scale each. scales: the shape of the scales."""
    if math.prod(scales) == 1:
        return 1, 1
    if tuple(scales) in ((shape[0],), (shape[0], 1)):
        return shape[0], 1
    if len(scales) != 2:
        return None
    rows, columns = scales
    if 0 < rows <= shape[0] and 0 < columns <= shape[1]:
        return rows, columns
    return None


def _find_block(size: int, count: int) -> int:
    """Return the length of so many blocks of a dimension; the last block may be shorter if the length is 128."""
    return 128 if -(-size // 128) == count else -(-size // count)


def has_scales(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a model has scales for a tensor, which may be invalid."""
    prefix = name.removesuffix("weight")
    return prefix != name and _find_scale(prefix, tensors) is not None


def fit_scales(tensor: Tensor, original: Tensor, files: Files) -> Quantized | None:
    """Return the values of integers without scales: one scale for each row, fitted to another tensor."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    if tensor.shape != original.shape or not _is_matrix(tensor, _PLAIN_DTYPES):
        return None
    rows, columns = tensor.shape
    plain = Quantized(
        tensor,
        shape=(rows, columns),
        bits=8,
        scales=np.ones((1, 1)),
        unit=0.0,
        files=files,
        scheme="",
    )
    scales = np.ones((rows, 1))
    step = max(1, _ROWS // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        numbers, _ = plain.read(first * columns, count * columns)
        values = read_float64(original, files, first * columns, count * columns, 0).reshape(count, -1)
        with np.errstate(all="ignore"):
            fitted = (numbers * values).sum(1) / (numbers * numbers).sum(1)
        scales[first : first + count, 0] = np.where(np.isfinite(fitted), fitted, 0.0)
    # Fitted scales are not exact: by up to 1.6 % for 8-bit floats, and 0.2 % for integers.
    number, unit = tensor.dtype, 2.0**-6
    if tensor.dtype in _INTEGERS:
        number, unit = f"int{DTYPES[tensor.dtype].size * 8}", 2.0**-9
    scheme = f"{number}, with scales fitted to A by row, because the file has no scales"
    return replace(
        plain,
        scales=scales,
        unit=unit,
        scheme=scheme,
        fitted=True,
    )


class Rounding(NamedTuple):
    """The difference between a quantized matrix and the original."""

    largest: float
    """The largest difference in units of the bound of rounding, which is half a step."""
    plausible: bool
    """Whether the scales are plausible."""

    @property
    def is_by_scales(self) -> bool:
        """Whether the matrix is the original after a rounding to multiples of plausible scales."""
        return self.plausible and self.largest <= MOST_ROUNDING


def relate_quantized(name: str, models: Models) -> dict[str, Relation]:
    """Compare quantized values with the original values, within half a step of plausible scales."""
    for tensors, partner in ((models.b, models.a), (models.a, models.b)):
        original = partner[name]
        # Two quantized tensors have no original.
        if not is_readable(original) or isinstance(original.data, Quantized):
            continue
        quantized = _find_scales(name, tensors, original, models.files)
        if quantized is None:
            continue
        rounding = measure_rounding(quantized, original, models.files)
        if rounding.is_by_scales:
            parameters: dict[str, Any] = {
                "scheme": quantized.scheme,
                "steps": rounding.largest / 2,
            }
            return {name: Relation(RelationKind.QUANTIZED, parameters)}
    return {}


def _find_scales(name: str, tensors: Mapping[str, Tensor], original: Tensor, files: Files) -> Quantized | None:
    """Return the values of a quantized tensor, with scales of its file or fitted scales; None for other tensors."""
    quantized = get_computed(tensors[name], Quantized)
    # Scales in the file that were not used are invalid, which fitted scales would hide.
    if quantized is not None or has_scales(name, tensors):
        return quantized
    return fit_scales(tensors[name], original, files)


def find_unit(original: Tensor) -> float:
    """Return the unit roundoff of a tensor that was quantized."""
    return _UNITS.get(original.dtype, _SINGLE)


def read_rows(quantized: Quantized, original: Tensor, files: Files) -> Iterator[tuple[int, Any, Any, Any]]:
    """Yield the first of some rows, their values, the bounds of the rounding of these, and the rows of the original."""
    from syncheck.tensors.differences import read_float64

    rows, columns = quantized.shape
    step = max(1, _ROWS // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values, bound = quantized.read(first * columns, count * columns)
        expected = read_float64(original, files, first * columns, count * columns, 0)
        yield first, values, bound, expected.reshape(count, columns)


def measure_rounding(quantized: Quantized, original: Tensor, files: Files) -> Rounding:
    """Compare a quantized matrix with the original, a tensor of equal shape."""
    import numpy as np

    block_rows, block_columns = quantized.blocks
    starts = np.arange(0, quantized.shape[1], block_columns)
    peaks = np.zeros(quantized.scales.shape)
    largest, unit = 0.0, find_unit(original)
    for first, values, bound, expected in read_rows(quantized, original, files):
        sizes = np.abs(expected)
        with np.errstate(all="ignore"):
            ratios = np.abs(values - expected) / (bound + unit * sizes + 1e-30)
        # A NaN or an infinity is not within half a step of anything.
        largest = max(largest, float(np.nan_to_num(ratios, nan=np.inf).max()))
        blocks = np.arange(first, first + len(values)) // block_rows
        np.maximum.at(peaks, blocks, np.maximum.reduceat(sizes, starts, axis=1))
    return Rounding(
        largest,
        are_plausible(
            peaks,
            scales=quantized.scales,
            least_peak=quantized.least_peak,
            fitted=quantized.fitted,
        ),
    )
