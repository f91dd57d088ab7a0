"""Convert tensors to other dtypes while they are read."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import DTYPES
from syncheck.snapshots import Tensor, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.dtypes import DType
    from syncheck.kernel.blocks import Files

_LARGEST_E4M3FN = 448


def convert(tensor: Tensor, dtypes: Sequence[str], files: Files) -> Tensor:
    """Return a tensor of floats, converted to each of the dtypes in turn. Its data is read in blocks."""
    data = _Converted(tensor, dtypes, files)
    return Tensor(
        tensor.name, dtypes[-1], tensor.shape, contiguous_strides(tensor.shape), tensor.path, 0, data=data,
    )  # fmt: skip


class _Converted:
    """The bytes of a tensor after conversions, read in blocks.

    As torch does, numbers are rounded to the nearest representable value, and ties to even. float64 becomes float32
    before it becomes a smaller dtype, and float8_e4m3fn, which has no infinity, becomes its largest number instead.
    """

    def __init__(self, source: Tensor, dtypes: Sequence[str], files: Files) -> None:
        self._source, self._files = source, files
        self._dtypes = [DTYPES[name] for name in (source.dtype, *dtypes)]

    def __getitem__(self, part: slice) -> bytes:
        import numpy as np

        own, *others = self._dtypes
        start, stop = (at // others[-1].size for at in (part.start, part.stop))
        # A comparison of two tensors uses slots from 0 on in each of its threads.
        values = np.frombuffer(self._files.read(self._source, start, stop - start, -get_ident()), own.dtype())
        return bytes(round_values(values, others).tobytes())


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
