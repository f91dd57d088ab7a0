"""Find tensors in memory that hold NaN or infinity.

The sum of a tensor is not finite if one of its elements is not, and a sum is the fastest pass over a tensor. The few
tensors whose sum is not finite, which may also have overflowed, are then searched byte by byte.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from syncheck.live.digest.parts import as_plain_tensors, is_torch
from syncheck.tensors.blocks import BLOCK
from syncheck.tensors.finiteness import FiniteScan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.snapshots import Tensor


def find_not_finite(tensors: Mapping[int, Tensor]) -> list[int]:
    """Return the keys of the tensors in memory that hold NaN or infinity.

    Buffers count with NaN only, because masks hold infinity. Tensors without bytes are skipped.
    """
    suspects: list[int] = []
    sums: dict[Any, dict[int, Any]] = defaultdict(dict)
    with as_plain_tensors():
        for key, source in _list_floats(tensors).items():
            if _has_sum(source):
                sums[source.device][key] = _start_sum(source)
            else:
                suspects.append(key)

        # All sums of a device are computed before the first of them is waited for.
        for sums_of_device in sums.values():
            suspects += _list_suspects(sums_of_device)

    return [key for key in sorted(suspects) if _holds_nonfinite(tensors[key])]


def _list_floats(tensors: Mapping[int, Tensor]) -> dict[int, Any]:
    """Return the tensors or arrays in memory of floats, which may have NaN or infinity, by key."""
    sources: dict[int, Any] = {}
    for key, tensor in tensors.items():
        # Only data in memory has a source. Files are searched when their digests are computed.
        source = getattr(tensor.data, "source", None)
        if source is not None and FiniteScan(tensor.dtype).is_float:
            sources[key] = source

    return sources


def _has_sum(source: Any) -> bool:
    """Whether torch computes the sum of a tensor: not of arrays, and not of 8-bit floats."""
    return is_torch(source) and source.element_size() > 1


def _start_sum(source: Any) -> Any:
    """Return the sum of a tensor on its device, without waiting for it."""
    torch: Any = sys.modules["torch"]
    if source.is_complex():
        source = torch.view_as_real(source.resolve_conj())

    # Sums of 16-bit floats would overflow.
    dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
    return source.sum(dtype=dtype)


def _list_suspects(sums: Mapping[int, Any]) -> list[int]:
    """Return the keys of the sums that are not finite.

    sums: of one device, which returns all of them at once.
    """
    torch: Any = sys.modules["torch"]
    doubles = [total.double() for total in sums.values()]
    numbers = torch.stack(doubles).tolist()
    suspects: list[int] = []
    for key, number in zip(sums, numbers, strict=True):
        if not math.isfinite(number):
            suspects.append(key)

    return suspects


def _holds_nonfinite(tensor: Tensor) -> bool:
    """Whether a tensor in memory holds NaN or infinity: the exact search, block by block."""
    # State of an optimizer is no parameter, and infinity is not usual in it either.
    is_buffer = not tensor.parameter and not tensor.name.startswith("optimizer.")
    scan = FiniteScan(tensor.dtype, nan_only=is_buffer)
    data: Any = tensor.data
    for start in range(0, data.source.nbytes, BLOCK):
        scan.look(data[start : start + BLOCK])

    return scan.found
