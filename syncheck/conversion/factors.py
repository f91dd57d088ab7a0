"""Find constants between two tensors: a factor, an offset, or a factor for each row, column or block.

A constant that fits all elements is evidence if it could not fit by chance. Each element shows as many bits as the
range of the values is wider than the rounding, and a constant needs `_LEAST_BITS` more than it has parameters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import unit_roundoff
from syncheck.conversion.recognition import are_finite, read_pairs
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor

# Bits that a constant must explain: with 2**40 tries, a fit by chance is likely.
_LEAST_BITS = 40.0
# Rounding of both tensors, and of the element from which the constant is computed.
_ROUNDINGS = 4
# An offset of a multiple of this is taken for exact, if it fits.
_FRACTION = 64
# The share of elements that an offset moves by more than their rounding at least.
_LEAST_MOVED = 0.25
# The smallest positive number of dtypes with too small a range for usual weights.
_SMALLEST = {"float16": 2.0**-24, "float8_e5m2": 2.0**-16, "float8_e4m3fn": 2.0**-9}
# The largest exponent of a power of 2 in float64.
_MOST_EXPONENT = 1023
# Fewer factors than this are no scales of blocks.
_FEWEST_BLOCKS = 3
# Elements in which blocks with one factor are searched.
_SAMPLE = 1 << 18


def relate_constants(name: str, models: Models) -> dict[str, Relation]:
    """Find a constant factor or a constant offset between two tensors of equal shape."""
    a, b = models.a[name], models.b[name]
    unit, smallest = _find_rounding(a, b)
    fits: list[_Fit] = [_Factor(unit, smallest), _Offset(unit, smallest)]
    for x, y in read_pairs(a, b, models.files):
        fits = [fit for fit in fits if fit.add(x, y)]
        # Without a fit, nothing more is read.
        if not fits:
            break
    evident_fits = [fit for fit in fits if fit.is_evident()]
    # A factor comes first: the offset of constant numbers fits as well.
    return {name: evident_fits[0].describe()} if evident_fits else {}


def _find_rounding(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the unit roundoff and the smallest number of the less precise dtype."""
    unit = max(unit_roundoff(a.dtype), unit_roundoff(b.dtype))
    smallest = max(_SMALLEST.get(a.dtype, 0.0), _SMALLEST.get(b.dtype, 0.0))
    return unit, smallest


class _Fit:
    """A constant that is fitted to the first block of two tensors, and checked in all of them."""

    def __init__(self, unit: float, smallest: float) -> None:
        """Take the unit roundoff and the smallest number of the less precise dtype."""
        self._unit, self._smallest = unit, smallest
        self._constant: float | None = None
        self._spread = 0.0
        self._bits = self._most_bits = 0.0

    def add(self, x: Any, y: Any) -> bool:
        """Return whether the constant fits a block."""
        import numpy as np

        if not are_finite(x, y):
            return False
        if self._constant is None:
            # Zeros fit every factor, and show no offset.
            if not x.any() and not y.any():
                return True
            # Quotients and squares of large numbers may be infinite.
            with np.errstate(over="ignore", invalid="ignore"):
                self._constant = self._compute(x, y)
                self._spread = float(np.std(y))
        if not math.isfinite(self._constant):
            return False
        with np.errstate(over="ignore"):
            expected, bounds = self._expect(x, y)
            is_close = np.abs(y - expected) <= bounds
        if not is_close.all():
            return False
        informative = bounds[(bounds > 0) & (bounds < self._spread)]
        bits = np.log2(self._spread / informative)
        self._bits += float(bits.sum())
        self._most_bits = float(bits.max(initial=self._most_bits))
        return True

    def is_evident(self) -> bool:
        """Whether the fit is not by chance, and not the identity."""
        if self._constant is None or self._is_identity():
            return False
        # The element from which the constant is computed shows nothing.
        return self._bits - self._most_bits > _LEAST_BITS

    def describe(self) -> Relation:
        """Return the relation with the constant."""
        raise NotImplementedError

    def _compute(self, x: Any, y: Any) -> float:
        raise NotImplementedError

    def _expect(self, x: Any, y: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def _is_identity(self) -> bool:
        raise NotImplementedError


class _Factor(_Fit):
    """A constant factor."""

    def describe(self) -> Relation:
        return Relation(RelationKind.SCALED, {"factor": self._constant or 0.0})

    def _compute(self, x: Any, y: Any) -> float:
        import numpy as np

        largest = int(np.argmax(np.abs(x)))
        factor = float(y[largest] / x[largest]) if x[largest] else math.nan
        fraction, exponent = math.frexp(factor)
        # A change of the sign, or of the exponent alone, is exact; only the dtype rounded the element.
        power = math.copysign(2.0 ** min(exponent - (abs(fraction) < 0.75), _MOST_EXPONENT), factor)
        return power if abs(power - factor) <= 2 * self._unit * abs(power) else factor

    def _expect(self, x: Any, y: Any) -> tuple[Any, Any]:
        import numpy as np

        return self._constant * x, _ROUNDINGS * (self._unit * np.abs(y) + self._smallest)

    def _is_identity(self) -> bool:
        # A factor of 0 is a tensor of zeros, which is not a multiple of A in particular.
        return not self._constant or abs(self._constant - 1) <= 16 * self._unit


class _Offset(_Fit):
    """A constant offset."""

    def __init__(self, unit: float, smallest: float) -> None:
        super().__init__(unit, smallest)
        self._count = self._moved = 0

    def describe(self) -> Relation:
        return Relation(RelationKind.OFFSET, {"offset": self._constant or 0.0})

    def _compute(self, x: Any, y: Any) -> float:
        import numpy as np

        # The smallest elements have the smallest rounding.
        sizes = np.maximum(np.abs(x), np.abs(y))
        smallest = int(np.argmin(sizes))
        self._doubt = 2 * self._unit * float(sizes[smallest])
        offset = float(y[smallest] - x[smallest])
        # Two finite numbers may have an infinite difference, which `add` refuses.
        if not math.isfinite(offset * _FRACTION):
            return offset
        simple = round(offset * _FRACTION) / _FRACTION
        return simple if abs(simple - offset) <= self._doubt else offset

    def _expect(self, x: Any, y: Any) -> tuple[Any, Any]:
        import numpy as np

        sizes = np.maximum(np.abs(x), np.abs(y))
        bounds = _ROUNDINGS / 2 * (self._unit * sizes + self._smallest) + self._doubt
        self._count += len(x)
        self._moved += int(np.count_nonzero(np.abs(y - x) > bounds))
        return x + self._constant, bounds

    def _is_identity(self) -> bool:
        # An offset below the rounding of most elements is no offset.
        return abs(self._constant or 0.0) <= 2 * self._doubt or self._moved < _LEAST_MOVED * self._count


def relate_blocks(name: str, models: Models) -> dict[str, Relation]:
    """Find a factor for each row, column or block of a matrix, or of a convolution as a matrix."""
    a, b = models.a[name], models.b[name]
    rows, columns = a.shape[0], math.prod(a.shape[1:])
    # A single row or column has a constant factor, if any.
    if min(rows, columns) < 2:
        return {}
    unit, smallest = _find_rounding(a, b)
    blocks = BlockFactors(
        rows,
        columns,
        tolerance=_ROUNDINGS * unit,
        smallest=_ROUNDINGS * smallest,
    )
    read_rows = partial(_read_rows, name, models)
    if blocks.fit(read_rows) and blocks.is_evident():
        return {name: Relation(RelationKind.FACTORS, blocks.describe())}
    return {}


def _read_rows(name: str, models: Models, first: int, count: int) -> tuple[Any, Any]:
    """Return some rows of both tensors as float64."""
    from syncheck.tensors.differences import read_float64

    rows = []
    for slot, tensor in enumerate((models.a[name], models.b[name])):
        columns = math.prod(tensor.shape[1:])
        block = read_float64(tensor, models.files, first * columns, count * columns, slot)
        rows.append(block.reshape(count, columns))
    return rows[0], rows[1]


class BlockFactors:
    """Factors of the blocks of a matrix."""

    def __init__(self, rows: int, columns: int, tolerance: float, smallest: float) -> None:
        """Take the shape of the matrix, and the relative and the absolute rounding of its elements."""
        self._rows, self._columns, self._tolerance, self._smallest = rows, columns, tolerance, smallest
        self._block = (rows, columns)
        self._count = self._unchanged = 0
        self._bits = 0.0
        self._least, self._most = math.inf, 0.0

    def fit(self, read: Callable[[int, int], tuple[Any, Any]]) -> bool:
        """Return whether factors of equal blocks fit all elements. read: return some rows of both matrices."""
        sample = min(self._rows, max(1, _SAMPLE // self._columns))
        block = find_block(*read(0, sample), self._tolerance, self._smallest)
        if block is None:
            return False
        # A block as high as the sample may have any height.
        height = self._rows if block[0] >= sample else block[0]
        self._block = (height, block[1])
        # One factor is a constant, and a factor for each element fits everything.
        if self._block in ((self._rows, self._columns), (1, 1)):
            return False
        factors = None
        step = min(height, sample) if height > sample else sample // height * height
        for first in range(0, self._rows, step):
            x, y = read(first, min(step, self._rows - first))
            if height <= sample or factors is None:
                factors = self._compute(x, y, min(height, len(x)))
            if not self._check(x, y, factors):
                return False
        return True

    def is_evident(self) -> bool:
        """Whether the factors differ, and do not fit by chance."""
        conditions = (
            self._bits > _LEAST_BITS,
            self._most > self._least * (1 + 2 * self._tolerance),
            # A matrix with some rows of zeros was pruned.
            self._least > 0,
            # Scales change most of several blocks.
            2 * self._unchanged < self._count,
            self._count >= _FEWEST_BLOCKS,
        )
        return all(conditions)

    def describe(self) -> dict[str, Any]:
        """Return the parameters of a relation."""
        return {
            "block": self._block,
            "of": (self._rows, self._columns),
            "count": self._count,
            "least": self._least,
            "most": self._most,
        }

    def _compute(self, x: Any, y: Any, height: int) -> Any:
        """Return the factor of each element of some rows, from the largest element of each block."""
        import numpy as np

        blocks_x, blocks_y = self._split_blocks(x, height), self._split_blocks(y, height)
        largest = np.abs(blocks_x).argmax(-1)[..., None]
        divisors = np.take_along_axis(blocks_x, largest, -1)[..., 0]
        quotients = np.take_along_axis(blocks_y, largest, -1)[..., 0]
        # A block of zeros has no factor.
        used = divisors != 0
        values = np.divide(
            quotients,
            divisors,
            out=np.zeros_like(divisors),
            where=used,
        )
        factors = values[used]
        sizes = np.abs(factors)
        unchanged = np.abs(factors - 1) <= self._tolerance
        self._count += sizes.size
        self._unchanged += int(np.count_nonzero(unchanged))
        self._least = float(sizes.min(initial=self._least))
        self._most = float(sizes.max(initial=self._most))
        # The element from which a factor is computed shows nothing.
        self._bits += math.log2(self._tolerance) * sizes.size
        return values.repeat(height, 0).repeat(self._block[1], 1)[: len(x), : self._columns]

    def _split_blocks(self, values: Any, height: int) -> Any:
        """Return the elements of each block of some rows: (blocks of rows, blocks of columns, elements)."""
        import numpy as np

        width = self._block[1]
        rows, columns = -(-len(values) // height), -(-self._columns // width)
        padded = np.zeros((rows * height, columns * width))
        padded[: len(values), : self._columns] = values
        return padded.reshape(rows, height, columns, width).swapaxes(1, 2).reshape(rows, columns, -1)

    def _check(self, x: Any, y: Any, factors: Any) -> bool:
        import numpy as np

        # Rows of one high block have the factors of the first rows.
        expected = x * factors[: len(x)]
        if not are_finite(expected, y):
            return False
        bounds = self._tolerance * np.abs(y)
        if not (np.abs(y - expected) <= bounds + self._smallest).all():
            return False
        self._bits -= math.log2(self._tolerance) * np.count_nonzero(bounds > self._smallest)
        return True


def find_block(x: Any, y: Any, tolerance: float, smallest: float) -> tuple[int, int] | None:
    """Return the largest block of rows and columns that may have a factor each; None without a common factor.

    x, y: the first rows of two matrices.
    tolerance, smallest: the relative and the absolute rounding of their elements.
    """
    import numpy as np

    is_precise = (x != 0) & (tolerance * np.minimum(np.abs(x), np.abs(y)) >= smallest)
    with np.errstate(all="ignore"):
        ratios = np.where(is_precise, y / x, np.nan)
    height = _find_period(ratios, 0, tolerance)
    width = _find_period(ratios, 1, tolerance)
    if height == width == 1:
        return None
    return height, width


def _find_period(ratios: Any, axis: int, tolerance: float) -> int:
    """Return the largest distance of the changes of the ratios along an axis; the whole length without changes."""
    import numpy as np

    lines = np.moveaxis(ratios, axis, 0)
    previous = lines[0]
    period = 0
    for position in range(1, len(lines)):
        line = lines[position]
        with np.errstate(all="ignore"):
            changes = np.abs(line - previous) > 2 * tolerance * np.abs(line)
        if changes.any():
            period = math.gcd(period, position)
        # An element of 0 has any factor.
        previous = np.where(np.isnan(line), previous, line)
        if period == 1:
            return 1
    return period or len(lines)
