"""Find tensors in memory that hold NaN or infinity, on the device of each tensor."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from syncheck.kernel.blocks import BLOCK
from syncheck.kernel.finiteness import FiniteScan
from syncheck.live.digest.parts import as_plain_tensors, is_torch, iterate_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.snapshots import Tensor


def find_not_finite(tensors: Mapping[int, Tensor]) -> list[int]:
    """Return the keys of the tensors in memory that hold NaN or infinity.

    Buffers count with NaN only, because masks hold infinity. Tensors without bytes are skipped.
    """
    positions: list[int] = []
    norms: list[tuple[int, Any, bool]] = []
    with as_plain_tensors():
        for position, tensor in tensors.items():
            scan = FiniteScan(tensor.dtype, nan_only=_is_buffer(tensor))
            source = getattr(tensor.data, "source", None)
            if source is None or not scan.is_float or not tensor.numel:
                continue
            if is_torch(source) and source.device.type != "cpu":
                norms.append((position, _start_norm(source), _is_buffer(tensor)))
                continue
            for start in range(0, source.nbytes, BLOCK):
                scan.look(tensor.data[start : start + BLOCK])  # type: ignore[index]  # has a source, so it has bytes
            if scan.found:
                positions.append(position)
        positions += _read_norms(norms)
    return sorted(positions)


def _is_buffer(tensor: Tensor) -> bool:
    return not tensor.parameter and not tensor.name.startswith("optimizer.")


def _start_norm(source: Any) -> Any:
    """Return the largest absolute value on the device of a tensor, without waiting for it. NaN is larger than all."""
    torch: Any = sys.modules["torch"]
    largest = []
    for _, part in iterate_parts(source):
        values = part.view(source.dtype) if part.dtype != source.dtype else part
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values.float() if values.element_size() == 1 else values  # torch has no norms of 8-bit floats
        largest.append(torch.linalg.vector_norm(values, math.inf).float())
    return largest[0] if len(largest) == 1 else torch.stack(largest).amax()


def _read_norms(norms: Sequence[tuple[int, Any, bool]]) -> list[int]:
    """Return the positions of norms that are not finite. Each device returns all of its norms at once."""
    torch: Any = sys.modules["torch"]
    by_device: dict[Any, list[tuple[int, Any, bool]]] = {}
    for entry in norms:
        by_device.setdefault(entry[1].device, []).append(entry)
    positions = []
    for entries in by_device.values():
        values = torch.stack([norm for _, norm, _ in entries]).tolist()
        for (position, _, nan_only), value in zip(entries, values, strict=True):
            if math.isnan(value) or (math.isinf(value) and not nan_only):
                positions.append(position)
    return positions
