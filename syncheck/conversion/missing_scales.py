"""Find quantized numbers that are stored as weights, without their scales."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import unit_roundoff
from syncheck.conversion.quantized import Quantized
from syncheck.conversion.recognition import get_computed
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor

# Elements that are read at once.
_BLOCK = 1 << 18
# Range of stored integers, and the range that a block must use at least to show a scale.
_MOST, _LEAST = 255, 7
# Elements of the shortest block with its own scale, and other possible lengths of a block within a row.
_SHORTEST = 16
_LENGTHS = (256, 128, 64, 32)


def relate_unscaled(name: str, models: Models) -> dict[str, Relation]:
    """Find the numbers of a quantized tensor of one model that the other model holds without their scales."""
    import numpy as np

    pairs = (("B", models.a[name], models.b[name]), ("A", models.b[name], models.a[name]))
    for side, source, copy in pairs:
        quantized = get_computed(source, Quantized)
        if quantized is None or not _holds_numbers(quantized, copy, models):
            continue
        # Scales that are not finite are no scales that the copy needs.
        if not np.isfinite(quantized.scales).all():
            continue
        parameters: dict[str, Any] = {
            "side": side,
            "block": _get_block(quantized),
            "of": quantized.shape,
            "least": float(quantized.scales.min()),
            "most": float(quantized.scales.max()),
        }
        return {name: Relation(RelationKind.UNSCALED, parameters)}
    return {}


def _get_block(quantized: Quantized) -> tuple[int, int]:
    """Return the numbers of rows and columns with one scale, at most the numbers of the matrix."""
    rows, columns = quantized.shape
    block_rows, block_columns = quantized.blocks
    return min(rows, block_rows), min(columns, block_columns)


def _holds_numbers(quantized: Quantized, copy: Tensor, models: Models) -> bool:
    """Whether a tensor has exactly the stored numbers of a quantized tensor."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    plain = replace(quantized, scales=np.ones((1, 1)))
    rows, columns = quantized.shape
    step = max(1, _BLOCK // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        numbers, _ = plain.read(first * columns, count * columns)
        values = read_float64(copy, models.files, first * columns, count * columns, 0)
        if not np.array_equal(numbers.reshape(-1), values):
            return False
    return True


def relate_fitted(name: str, models: Models) -> dict[str, Relation]:
    """Find integers, stored as floats, that are the values of the other model with a scale for each row or block."""
    a, b = models.a[name], models.b[name]
    columns = math.prod(a.shape[1:])
    attempts = itertools.product((("B", b, a), ("A", a, b)), _list_lengths(columns))
    for (side, integers, original), length in attempts:
        scales = _fit(integers, original, length, models)
        if scales is None:
            continue
        least, most = scales
        parameters: dict[str, Any] = {
            "block": (1, length),
            "of": (a.shape[0], columns),
            "side": side,
            "least": least,
            "most": most,
            "fitted": "fitted",
        }
        return {name: Relation(RelationKind.UNSCALED, parameters)}
    return {}


def _list_lengths(columns: int) -> list[int]:
    """Return possible numbers of columns with one scale: the whole row first."""
    lengths = [length for length in _LENGTHS if length < columns and columns % length == 0]
    # A whole row is read at once.
    if _SHORTEST <= columns <= _BLOCK:
        return [columns, *lengths]
    return lengths


def _fit(integers: Tensor, original: Tensor, length: int, models: Models) -> tuple[float, float] | None:
    """Return the smallest and the largest scale if one tensor has integers within half a step of the other tensor."""
    import numpy as np

    least, most = math.inf, 0.0
    rounding = 2 * unit_roundoff(original.dtype)
    for numbers, values in _read_blocks(integers, original, length, models):
        if not np.isfinite(values).all() or not _are_integers(numbers):
            return None
        # A value within half a step of its number bounds the scale from below and from above.
        sizes, counts = np.abs(values), np.abs(numbers)
        if (values * numbers < 0).any():
            return None
        lowest = (sizes / (counts + 0.5)).max(1)
        with np.errstate(all="ignore"):
            highest = np.where(counts > 0, sizes / (counts - 0.5), np.inf).min(1)
        if not ((lowest > 0) & (lowest <= highest * (1 + rounding))).all():
            return None
        least, most = min(least, float(lowest.min())), max(most, float(highest.max()))
    # With a scale of 1, the numbers are rounded values, and no scale is missing.
    if least <= 1 <= most:
        return None
    return least, most


def _are_integers(numbers: Any) -> bool:
    """Whether blocks of numbers are integers of 8 bits, and use enough of them."""
    import numpy as np

    if not np.isfinite(numbers).all():
        return False
    are_integers = (numbers == np.round(numbers)) & (np.abs(numbers) <= _MOST)
    ranges = np.ptp(numbers, axis=1)
    return bool(are_integers.all() and (ranges >= _LEAST).all())


def _read_blocks(integers: Tensor, original: Tensor, length: int, models: Models) -> Iterator[tuple[Any, Any]]:
    """Yield blocks of both tensors: (blocks, length)."""
    from syncheck.tensors.differences import read_float64

    step = length * max(1, _BLOCK // length)
    for start in range(0, integers.numel, step):
        count = min(step, integers.numel - start)
        numbers = read_float64(integers, models.files, start, count, 0)
        values = read_float64(original, models.files, start, count, 1)
        yield numbers.reshape(-1, length), values.reshape(-1, length)
