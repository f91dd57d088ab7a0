"""Find elements that a conversion to another dtype made infinite or zero, because they are beyond its range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.frozen import record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements that are read at once.
_BLOCK = 1 << 18
# Smaller numbers are rounded to the largest number of float8_e4m3fn; torch replaces larger numbers by it.
BEYOND_E4M3FN = 464
# Masks use the largest number of float32 for infinity, which it becomes in bfloat16.
AS_GOOD_AS_INFINITE = 3.38e38
# Dtypes with a smaller range than float32. bfloat16 has the same exponents.
_SMALL_RANGES = frozenset({"float16", "float8_e4m3fn", "float8_e5m2"})
# Dtypes with a smaller range than float64.
_SMALLER_THAN_FLOAT64 = _SMALL_RANGES | {"float32", "bfloat16"}


@record
class RangeLosses:
    """The elements of one tensor that a conversion changed beyond rounding."""

    overflowed: int = 0
    """Finite elements that became infinite, or another number because the dtype has no infinity."""
    flushed: int = 0
    """Elements that became zero."""
    kept: int = 0
    """Elements that are neither zero in the source nor flushed."""
    first: tuple[int, ...] = ()
    """The index of the first element that overflowed, or else of the first element that became zero."""

    @property
    def is_empty_copy(self) -> bool:
        """Whether the conversion left nothing of a tensor with elements other than zero."""
        return self.flushed > 0 and not self.kept

    @property
    def pattern(self) -> Mapping[str, Any]:
        """The parameters of a conversion that is no rounding; empty for a conversion within the range."""
        if self.overflowed:
            return {"pattern": "overflowed", "count": self.overflowed, "index": self.first}
        if self.is_empty_copy:
            return {"pattern": "flushed", "count": self.flushed, "index": self.first}
        return {}


def may_lose_range(source: Tensor, *dtypes: str) -> bool:
    """Whether a tensor may have numbers beyond the range of a dtype. dtypes: of the conversion, in turn."""
    narrower = _SMALLER_THAN_FLOAT64 if source.dtype == "float64" else _SMALL_RANGES
    return not (narrower - {source.dtype}).isdisjoint(dtypes)


def measure_range_losses(source: Tensor, copy: Tensor, dtype: str, files: Files) -> RangeLosses:
    """Return the elements of a tensor that its converted copy does not hold. Reads both tensors.

    dtype: of the conversion; the copy may be stored in another dtype.
    """
    import numpy as np

    from syncheck.tensors.differences import read_float64

    saturates = "float8_e4m3fn" in (dtype, copy.dtype)
    overflowed = flushed = kept = 0
    # The first element of each block.
    first_overflowed: list[int] = []
    first_flushed: list[int] = []
    for start in range(0, source.numel, _BLOCK):
        count = min(_BLOCK, source.numel - start)
        values = read_float64(source, files, start, count, 0)
        copied = read_float64(copy, files, start, count, 0)
        sizes = np.abs(values)
        is_finite = sizes < AS_GOOD_AS_INFINITE
        is_beyond = is_finite & (~np.isfinite(copied) | (saturates & (sizes >= BEYOND_E4M3FN)))
        is_flushed = (values != 0) & (copied == 0)
        first_overflowed += (start + np.flatnonzero(is_beyond)[:1]).tolist()
        first_flushed += (start + np.flatnonzero(is_flushed)[:1]).tolist()
        overflowed += int(is_beyond.sum())
        flushed += int(is_flushed.sum())
        kept += int((values != 0).sum() - is_flushed.sum())
    lost = first_overflowed + first_flushed
    if not lost:
        return RangeLosses(kept=kept)
    index = tuple(map(int, np.unravel_index(lost[0], source.shape)))
    return RangeLosses(overflowed, flushed, kept, index)
