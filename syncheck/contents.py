"""The contents of one checkpoint: its tensors with kinds and statistics, its values and its metadata."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck import readers
from syncheck.dtypes import DTYPES
from syncheck.errors import brief
from syncheck.kernel.blocks import Files
from syncheck.kernel.moments import NAMES, moments_of
from syncheck.kinds import classify_snapshot

if TYPE_CHECKING:
    from syncheck.snapshots import Metadata, Tensor


def describe(path: str) -> dict[str, Any]:
    """Return the contents of a checkpoint as JSON values.

    Each tensor has kind, dtype, shape, bytes, min, max, mean, std and the number of nonfinite elements. Statistics
    cover finite elements, in float64, and are None without any and for complex tensors. Raises CheckpointError for a
    file that cannot be read.
    """
    snapshot = readers.read(path)
    kinds, guessed, _ = classify_snapshot(snapshot)
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
                | _measure_statistics(tensor, files)
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
        "metadata": None if snapshot.metadata is None else _describe_metadata(snapshot.metadata),
    }


def _is_json(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**64  # Python refuses to write integers of more than 4,300 digits
    return value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def _describe_metadata(metadata: Metadata) -> dict[str, Any]:
    """Return the fields that identify the file; the kinds of the tensors contain its lists of names."""
    wanted = ("run", "run_id", "step", "epoch", "rank", "world_size", "host", "buffers_synced")
    return {name: getattr(metadata, name) for name in wanted}


def _measure_statistics(tensor: Tensor, files: Files) -> dict[str, Any]:
    if tensor.refused:
        return dict.fromkeys((*NAMES, "nonfinite"))
    if tensor.digest is not None:  # a fingerprint stores the statistics instead of the bytes
        return {name: getattr(tensor.digest, name) for name in (*NAMES, "nonfinite")}
    seen = moments_of(tensor, files)
    return seen.found() | {"nonfinite": seen.nonfinite}
