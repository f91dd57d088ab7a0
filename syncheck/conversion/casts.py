"""Convert tensors to other dtypes while they are read."""

from __future__ import annotations

from dataclasses import dataclass
from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.conversion.range_losses import (
    AS_GOOD_AS_INFINITE,
    BEYOND_E4M3FN,
    RangeLosses,
    measure_range_losses,
)
from syncheck.snapshots import Tensor, contiguous_strides
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.tensors.blocks import Files
    from syncheck.tensors.dtypes import DType

    _Round = Callable[[Any, Sequence[DType]], Any]

_LARGEST_E4M3FN = 448
# Bits of the significand by dtype; the fewest bits for a dtype of another kind.
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
_FEWEST_BITS = 2
# Possible dtypes of a model in between, the most precise dtype first.
_CASTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def is_conversion(a: Tensor, b: Tensor, dtype: str, files: Files) -> bool:
    """Whether B is exactly A after one conversion to a dtype, as `check_conversion` does."""
    return check_conversion(a, b, dtype, files) is not None


def check_conversion(a: Tensor, b: Tensor, dtype: str, files: Files) -> RangeLosses | None:
    """Return the elements that became zero if B is exactly A after a conversion to a dtype, or `None` without a proof.

    B may store the result in a dtype that holds it exactly, like float32 for numbers of bfloat16. A number beyond
    the range of the dtype is no conversion: it becomes infinite, or another number. Neither is a tensor of zeros that
    has nothing of A.

    a, b: two tensors of equal shape, whose elements can be compared.
    dtype: name of the dtype of the conversion.
    """
    seen = _SeenElements()
    converted = _convert_watched(a, (dtype, b.dtype), files, round_values, seen)
    if len(cluster_replicas([converted, b], files)) > 1:
        return None
    if b.dtype != dtype:
        # The dtype of B may have rounded the elements a second time.
        conversions = [
            _convert_watched(a, (dtype,), files, round_values, seen),
            _convert_watched(b, (dtype,), files, round_values, seen),
        ]
        if len(cluster_replicas(conversions, files)) > 1:
            return None
    # All elements were read, so that every number beyond the range was found.
    if seen.overflowed:
        return None
    # Most conversions flush no element, and need no second pass.
    if not seen.flushed:
        return RangeLosses()
    losses = measure_range_losses(a, b, dtype, files)
    return None if losses.is_empty_copy else losses


def convert(tensor: Tensor, dtypes: Sequence[str], files: Files, *, truncate: bool = False) -> Tensor:
    """Return a tensor of floats, converted to each of the dtypes in turn. Its data is read in blocks.

    truncate: cut off the last bits, as integer code does that keeps the upper half of a float32, instead of rounding.
    """
    round_ = round_toward_zero if truncate else round_values
    return _convert_watched(tensor, dtypes, files, round_, _SeenElements())


def _convert_watched(
    tensor: Tensor, dtypes: Sequence[str], files: Files, round_: _Round, seen: _SeenElements
) -> Tensor:
    """Return a tensor as `convert` does. seen: collects the elements beyond the range while the data is read."""
    data = _Converted(tensor, dtypes, files, round_, seen)
    return Tensor(
        tensor.name, dtypes[-1], tensor.shape, contiguous_strides(tensor.shape), tensor.path, 0, data=data,
    )  # fmt: skip


@dataclass(slots=True)
class _SeenElements:
    """Elements in the blocks that conversions have read so far."""

    overflowed: bool = False
    """Whether numbers were beyond the range of a dtype."""
    flushed: bool = False
    """Whether numbers became zero."""


class _Converted:
    """The bytes of a tensor after conversions, read in blocks.

    As torch does, numbers are rounded to the nearest representable value, and ties to even. float64 becomes float32
    before it becomes a smaller dtype, and float8_e4m3fn, which has no infinity, becomes its largest number instead.
    """

    def __init__(
        self,
        source: Tensor,
        dtypes: Sequence[str],
        files: Files,
        round_: _Round,
        seen: _SeenElements,
    ) -> None:
        self._source, self._files = source, files
        self._round = round_
        self._dtypes = [DTYPES[name] for name in (source.dtype, *dtypes)]
        self._seen = seen

    def __getitem__(self, part: slice) -> bytes:
        import numpy as np

        source_dtype, *target_dtypes = self._dtypes
        size = target_dtypes[-1].size
        start, stop = part.start // size, part.stop // size
        # A comparison of two tensors uses slots from 0 on in each of its threads.
        data = self._files.read(self._source, start, stop - start, -get_ident())
        values = np.frombuffer(data, source_dtype.dtype())
        rounded = self._round(values, target_dtypes)
        # One number beyond the range is enough.
        if not self._seen.overflowed:
            self._seen.overflowed = _overflows(values, rounded, target_dtypes)
        if not self._seen.flushed:
            self._seen.flushed = bool((np.equal(rounded, 0) & np.not_equal(values, 0)).any())
        return bytes(rounded.tobytes())


def _overflows(values: Any, rounded: Any, dtypes: Sequence[DType]) -> bool:
    """Whether a finite number became infinite, or was replaced by the largest number of a dtype without infinity."""
    import numpy as np

    wide = values.astype(np.float64)
    finite = np.abs(wide) < AS_GOOD_AS_INFINITE
    if not np.isfinite(rounded.astype(np.float64)[finite]).all():
        return True
    saturates = any(row.name == "float8_e4m3fn" for row in dtypes)
    return saturates and bool((np.abs(wide[finite]) >= BEYOND_E4M3FN).any())


def round_values(values: Any, dtypes: Sequence[DType]) -> Any:
    """Return an array of floats, converted to each of the dtypes in turn. Never exchanges the order of two numbers."""
    import numpy as np

    with np.errstate(all="ignore"):  # numbers beyond the range of the dtype become infinite
        for row in dtypes:
            if row.size < 4:
                values = values.astype(np.float32)
            if row.name == "float8_e4m3fn":
                values = values.clip(-_LARGEST_E4M3FN, _LARGEST_E4M3FN)
            values = values.astype(row.dtype())
    return values


def round_toward_zero(values: Any, dtypes: Sequence[DType]) -> Any:
    """Return an array of floats, converted to each of the dtypes in turn, without any number of a larger magnitude."""
    import numpy as np

    for row in dtypes:
        rounded = round_values(values, [row])
        # Code that cuts off bits has a float32 first, whose upper half is a bfloat16.
        with np.errstate(over="ignore"):
            exact = values.astype(np.float32) if row.size < 4 else values
        is_larger = np.abs(rounded.astype(np.float64)) > np.abs(exact.astype(np.float64))
        # The magnitudes of floats have the order of their bits, so the previous word is the next smaller magnitude.
        words = rounded.view(f"u{row.size}") - is_larger.astype(f"u{row.size}")
        values = words.view(row.dtype())
    return values


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype: half the distance between 1 and the next number."""
    return 2.0 ** -_BITS.get(dtype, _FEWEST_BITS)


def list_narrower(source: str, copy: str) -> list[str]:
    """Return the possible dtypes between a tensor and its copy. Parameters: the dtypes of both."""
    # Only a smaller dtype loses digits.
    size = DTYPES[source].size
    return [dtype for dtype in _CASTS if dtype != copy and DTYPES[dtype].size < size]


def is_exact(dtype: str, stored: str) -> bool:
    """Whether the numbers of a dtype keep their digits if they are stored in another dtype."""
    return unit_roundoff(stored) <= unit_roundoff(dtype)
