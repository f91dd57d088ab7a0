"""What is in one checkpoint: every tensor with its kind, place and statistics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck import readers
from syncheck.dtypes import DTYPES
from syncheck.errors import brief
from syncheck.kernel.blocks import Files
from syncheck.kernel.moments import NAMES, compute_moments
from syncheck.kinds import kinds_in

if TYPE_CHECKING:
    from syncheck.snapshots import Metadata, Tensor


def describe(path: str) -> dict[str, Any]:
    """List a checkpoint's tensors with kind, dtype, shape, bytes, min, max, mean, std and nonfinite count.

    Statistics are over finite elements, in float64, None where there are none; complex tensors have none.
    Returns JSON values. Raises CheckpointError for a file that cannot be read.
    """
    snapshot = readers.read(path)
    kinds, guessed, _ = kinds_in(snapshot)
    rows = []
    with Files() as files:
        for name, tensor in snapshot.tensors.items():
            row: dict[str, Any] = {
                "name": name,
                "kind": kinds[name],
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
            }
            size = None if tensor.refused else tensor.numel * DTYPES[tensor.dtype].size
            rows.append(
                row
                | {"bytes": size, "refused": None if tensor.refused is None else str(tensor.refused)}
                | _statistics(tensor, files)
            )
    values = {name: value if _is_json(value) else brief(value, 200) for name, value in snapshot.values.items()}
    return {
        "path": path,
        "format": snapshot.format,
        "bytes": snapshot.bytes,
        "kinds_guessed": guessed,
        "tensors": rows,
        "values": values,
        "stubs": list(snapshot.stubs),
        "metadata": None if snapshot.metadata is None else _metadata(snapshot.metadata),
    }


def _is_json(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64  # Python refuses to write integers of more than 4,300 digits
    return value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def _metadata(metadata: Metadata) -> dict[str, Any]:
    """Keep what identifies the file; the lists of names are in the tensors' kinds."""
    wanted = ("run", "run_id", "step", "epoch", "rank", "world_size", "host", "buffers_synced")
    return {name: getattr(metadata, name) for name in wanted}


def _statistics(tensor: Tensor, files: Files) -> dict[str, Any]:
    if tensor.refused:
        return dict.fromkeys((*NAMES, "nonfinite"))
    if tensor.digest is not None:  # a fingerprint has the statistics in place of the bytes
        return {name: getattr(tensor.digest, name) for name in (*NAMES, "nonfinite")}
    seen = compute_moments(tensor, files)
    return seen.values() | {"nonfinite": seen.nonfinite}
