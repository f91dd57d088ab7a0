"""Find tensors of B without any relation to tensors of A.

One huge element ruins a correlation, and so does a part of the elements. So nothing of A is in B only if few elements
are equal, and the correlation is zero with and without the largest elements.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import unit_roundoff
from syncheck.conversion.recognition import read_pairs
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from syncheck.conversion.model_pairs import Models

# Fewer elements than this do not show the absence of a correlation.
_LEAST = 64
# Absolute correlations below this, or below `_SIGMAS` standard deviations of the correlation of independent numbers,
# show unrelated tensors. Fine-tuned, averaged and pruned models are far above: docs/conversion-trials.md.
_CORRELATION, _SIGMAS = 0.05, 4.0
# Elements that a correlation is computed from.
_CORRELATED = 1 << 22
# Share of equal elements, among elements that are not 0 in both tensors, above which a part of A is in B. Independent
# numbers of 8-bit floats are equal in about 3 of 100 elements.
_EQUAL = 0.1
# Elements beyond so many typical deviations from the median are moved to this bound.
_BOUND = 3.0


def relate_unrelated(name: str, models: Models) -> dict[str, Relation]:
    """Find the absence of a correlation, and a constant tensor."""
    a, b = models.a[name], models.b[name]
    if a.numel < _LEAST:
        return {}
    unit = max(unit_roundoff(a.dtype), unit_roundoff(b.dtype))
    plain, clipped = _Correlation(), _Correlation()
    bounds = None
    equal = nonzero = 0
    for x, y in read_pairs(a, b, models.files):
        if not plain.add(x, y):
            return {}  # NaN and infinity have no correlation
        if bounds is None:
            # The first block shows which values are typical.
            bounds = _find_bounds(x), _find_bounds(y)
        clipped.add(x.clip(*bounds[0]), y.clip(*bounds[1]))
        equal += _count_equal(x, y, unit)
        nonzero += int(((x != 0) | (y != 0)).sum())
        if plain.count >= _CORRELATED:
            break
    # The same values at other positions are of A as well.
    if equal > _EQUAL * nonzero or plain.has_equal_sums(unit):
        return {}
    constant_a, constant_b = plain.are_constant()
    if constant_b and not constant_a:
        return {name: Relation(RelationKind.UNRELATED, {"value": plain.mean_b})}
    limit = max(_CORRELATION, _SIGMAS / math.sqrt(plain.count))
    correlations = [plain.compute(), clipped.compute()]
    if all(abs(correlation) < limit for correlation in correlations):
        return {name: Relation(RelationKind.UNRELATED, {"correlation": correlations[0]})}
    return {}


def _count_equal(x: Any, y: Any, unit: float) -> int:
    """Return the number of elements that are equal within rounding, and not 0."""
    import numpy as np

    return int(((np.abs(x - y) <= unit * np.abs(y)) & (y != 0)).sum())


def _find_bounds(values: Any) -> tuple[float, float]:
    """Return the bounds of typical values."""
    import numpy as np

    middle = float(np.median(values))
    deviation = float(np.median(np.abs(values - middle)))
    # Half of the elements are equal, for example in a sparse tensor.
    if not deviation:
        return -math.inf, math.inf
    return middle - _BOUND * deviation, middle + _BOUND * deviation


class _Correlation:
    """The correlation of two tensors, from the sums of their blocks."""

    def __init__(self) -> None:
        import numpy as np

        self.count = 0
        self._sums = np.zeros(5)

    def add(self, x: Any, y: Any) -> bool:
        """Add a block, and return whether all sums are finite."""
        import numpy as np

        with np.errstate(all="ignore"):
            self._sums += (x.sum(), y.sum(), x @ x, y @ y, x @ y)
        self.count += x.size
        return bool(np.isfinite(self._sums).all())

    @property
    def mean_b(self) -> float:
        """The mean of the second tensor."""
        return float(self._sums[1] / self.count)

    def are_constant(self) -> tuple[bool, bool]:
        """Whether each tensor is constant."""
        import numpy as np

        constant = self._deviations() < 1e-7 * np.sqrt(np.maximum(self._sums[2:4] / self.count, 1e-300))
        return bool(constant[0]), bool(constant[1])

    def has_equal_sums(self, unit: float) -> bool:
        """Whether the sums and the sums of squares agree within rounding, as for a permutation."""
        import numpy as np

        # Sums of many roundings deviate by their root mean square.
        spread = unit * np.sqrt(max(self._sums[2], self._sums[3]))
        rounding = self.count * np.finfo(np.float64).eps * np.abs(self._sums[:4]).max()
        if abs(self._sums[0] - self._sums[1]) > 4 * spread + rounding:
            return False
        return bool(abs(self._sums[2] - self._sums[3]) <= 4 * unit * max(self._sums[2:4]) / self.count**0.5 + rounding)

    def compute(self) -> float:
        """Return the correlation; NaN for a constant tensor."""
        import numpy as np

        means, deviations = self._sums[:2] / self.count, self._deviations()
        with np.errstate(all="ignore"):
            return float((self._sums[4] / self.count - means[0] * means[1]) / (deviations[0] * deviations[1]))

    def _deviations(self) -> Any:
        import numpy as np

        means = self._sums[:2] / self.count
        return np.sqrt(np.maximum(self._sums[2:4] / self.count - means**2, 0))
