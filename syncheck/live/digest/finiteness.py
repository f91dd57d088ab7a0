"""Find tensors in memory that hold NaN or infinity.

The sum of a tensor is not finite if one of its elements is not, and a sum is the fastest pass over a tensor. The few
tensors whose sum is not finite, which may also have overflowed, are then searched byte by byte.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from syncheck.kernel.blocks import BLOCK
from syncheck.kernel.finiteness import FiniteScan
from syncheck.live.digest.parts import as_plain_tensors, is_torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.snapshots import Tensor


def find_not_finite(tensors: Mapping[int, Tensor]) -> list[int]:
    """Return the keys of the tensors in memory that hold NaN or infinity.

    Buffers count with NaN only, because masks hold infinity. Tensors without bytes are skipped.
    """
    suspects: list[int] = []
    sums: dict[Any, dict[int, Any]] = {}
    with as_plain_tensors():
        for key, tensor in tensors.items():
            source = getattr(tensor.data, "source", None)
            if source is None or not tensor.numel or not FiniteScan(tensor.dtype).is_float:
                continue
            if not is_torch(source) or source.element_size() == 1:  # torch has no sums of 8-bit floats
                suspects.append(key)
                continue
            sums.setdefault(source.device, {})[key] = _start_sum(source)
        for by_key in sums.values():
            suspects += _list_suspects(by_key)
    return sorted(key for key in suspects if _holds_nonfinite(tensors[key]))


def _start_sum(source: Any) -> Any:
    """Return the sum of a tensor on its device, without waiting for it."""
    torch: Any = sys.modules["torch"]
    if source.is_complex():
        source = torch.view_as_real(source.resolve_conj())
    # Sums of 16-bit floats would overflow.
    return source.sum(dtype=torch.float64 if source.dtype == torch.float64 else torch.float32)


def _list_suspects(sums: Mapping[int, Any]) -> list[int]:
    """Return the keys of the sums that are not finite. sums: of one device, which returns all of them at once."""
    torch: Any = sys.modules["torch"]
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return [key for key, value in zip(sums, values, strict=True) if not math.isfinite(value)]


def _holds_nonfinite(tensor: Tensor) -> bool:
    is_buffer = not tensor.parameter and not tensor.name.startswith("optimizer.")
    scan = FiniteScan(tensor.dtype, nan_only=is_buffer)
    data: Any = tensor.data
    for start in range(0, data.source.nbytes, BLOCK):
        scan.look(data[start : start + BLOCK])
    return scan.found
