"""Convert tensors to other dtypes while they are read."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.snapshots import Tensor, contiguous_strides
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.tensors.blocks import Files
    from syncheck.tensors.dtypes import DType

_LARGEST_E4M3FN = 448
# Smaller numbers are rounded to the largest one; torch replaces all others by it, however large they are.
_BEYOND_E4M3FN = 464
# Bits of the significand by dtype; the fewest bits for a dtype of another kind.
_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
_FEWEST_BITS = 2
# Masks use the largest number of float32 for infinity, which it becomes in bfloat16.
_AS_GOOD_AS_INFINITE = 3.38e38


def is_conversion(a: Tensor, b: Tensor, dtype: str, files: Files) -> bool:
    """Whether B is exactly A after one conversion to a dtype.

    B may store the result in a dtype that holds it exactly, like float32 for numbers of bfloat16. A number beyond
    the range of the dtype is no conversion: it becomes infinite, or another number.

    a, b: two tensors of equal shape, whose elements can be compared.
    dtype: name of the dtype of the conversion.
    """
    converted = convert(a, (dtype, b.dtype), files)
    if len(cluster_replicas([converted, b], files)) > 1:
        return False
    conversions = [converted]
    if b.dtype != dtype:
        # The dtype of B may have rounded the elements a second time.
        conversions += [convert(a, (dtype,), files), convert(b, (dtype,), files)]
        if len(cluster_replicas(conversions[1:], files)) > 1:
            return False
    # All elements were read, so that every number beyond the range was found.
    return not any(isinstance(tensor.data, _Converted) and tensor.data.overflowed for tensor in conversions)


def convert(tensor: Tensor, dtypes: Sequence[str], files: Files) -> Tensor:
    """Return a tensor of floats, converted to each of the dtypes in turn. Its data is read in blocks."""
    data = _Converted(tensor, dtypes, files)
    return Tensor(
        tensor.name, dtypes[-1], tensor.shape, contiguous_strides(tensor.shape), tensor.path, 0, data=data,
    )  # fmt: skip


class _Converted:
    """The bytes of a tensor after conversions, read in blocks.

    overflowed: whether the blocks read so far had numbers beyond the range of a dtype.

    As torch does, numbers are rounded to the nearest representable value, and ties to even. float64 becomes float32
    before it becomes a smaller dtype, and float8_e4m3fn, which has no infinity, becomes its largest number instead.
    """

    def __init__(self, source: Tensor, dtypes: Sequence[str], files: Files) -> None:
        self._source, self._files = source, files
        self._dtypes = [DTYPES[name] for name in (source.dtype, *dtypes)]
        self.overflowed = False

    def __getitem__(self, part: slice) -> bytes:
        import numpy as np

        source_dtype, *target_dtypes = self._dtypes
        size = target_dtypes[-1].size
        start, stop = part.start // size, part.stop // size
        # A comparison of two tensors uses slots from 0 on in each of its threads.
        data = self._files.read(self._source, start, stop - start, -get_ident())
        values = np.frombuffer(data, source_dtype.dtype())
        rounded = round_values(values, target_dtypes)
        # One number beyond the range is enough.
        if not self.overflowed:
            self.overflowed = _overflows(values, rounded, target_dtypes)
        return bytes(rounded.tobytes())


def _overflows(values: Any, rounded: Any, dtypes: Sequence[DType]) -> bool:
    """Whether a finite number became infinite, or was replaced by the largest number of a dtype without infinity."""
    import numpy as np

    wide = values.astype(np.float64)
    finite = np.abs(wide) < _AS_GOOD_AS_INFINITE
    if not np.isfinite(rounded.astype(np.float64)[finite]).all():
        return True
    saturates = any(row.name == "float8_e4m3fn" for row in dtypes)
    return saturates and bool((np.abs(wide[finite]) >= _BEYOND_E4M3FN).any())


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


def unit_roundoff(dtype: str) -> float:
    """Return the unit roundoff of a dtype: half the distance between 1 and the next number."""
    return 2.0 ** -_BITS.get(dtype, _FEWEST_BITS)
