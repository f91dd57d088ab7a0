"""Gaps between integers of every width, without overflow, and without rounding but in the relative gap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.gaps.floats import pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from syncheck.dtypes import DType
    from syncheck.gaps.floats import Where
    from syncheck.gaps.measured import Statistics

    Array = NDArray[Any]


def integer_gaps(row: DType, arrays: Sequence[Array], where: Where, total: Statistics, majority: bool) -> None:
    """Take in the gaps of integers and bools, against the first array or, per element, from the lowest to the highest.

    where: says what elements of the tensor these are.
    """
    kind = np.int64 if row.family == "int" else np.uint64
    for low, high in pairs([array.astype(kind) for array in arrays], majority):
        gap = high.view(np.uint64) - low.view(np.uint64)  # what overflows wraps round, to the right number
        at = int(np.argmax(gap))
        total.keep(int(gap[at]), where[at])
        scale = np.maximum(np.abs(low.astype(np.float64)), np.abs(high.astype(np.float64)))
        total.keep_relative(float((gap.astype(np.float64) / np.maximum(scale, 1)).max()))
