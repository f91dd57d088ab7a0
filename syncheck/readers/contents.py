"""Describe one checkpoint: kind, dtype, shape and statistics of every tensor (`syncheck show`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck.readers.open import read
from syncheck.tensors.blocks import Files
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.kinds import classify_snapshot
from syncheck.tensors.moments import NAMES, compute_moments
from syncheck.text import brief

if TYPE_CHECKING:
    from syncheck.snapshots import Metadata, Tensor


def describe(path: str) -> dict[str, Any]:
    """Return the contents of a checkpoint as JSON values.

    Tensors have kind, dtype, shape, bytes, min, max, mean, std and the number of non-finite elements. Statistics are
    over the finite elements, in float64; None without finite elements, and for complex tensors. Raises CheckpointError
    if the file cannot be read.
    """
    snapshot = read(path)
    kinds, guessed, _ = classify_snapshot(snapshot)
    rows = []
    with Files() as files:
        for name, tensor in snapshot.tensors.items():
            rows.append({"name": name, "kind": kinds[name]} | _describe_tensor(tensor, files))

    values = {name: value if _is_json(value) else brief(value, 200) for name, value in snapshot.values.items()}
    metadata = None if snapshot.metadata is None else _describe_metadata(snapshot.metadata)
    return {
        "path": path,
        "format": snapshot.format,
        "bytes": snapshot.bytes,
        "kinds_guessed": guessed,
        "tensors": rows,
        "values": values,
        "stubs": list(snapshot.stubs),
        "metadata": metadata,
    }


def _describe_tensor(tensor: Tensor, files: Files) -> dict[str, Any]:
    """Return the fields of a tensor without name and kind."""
    fields: dict[str, Any] = {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "bytes": None,
        "refused": None,
    }
    if tensor.refused is None:
        fields["bytes"] = tensor.numel * DTYPES[tensor.dtype].size
    else:
        fields["refused"] = str(tensor.refused)
    return fields | _compute_statistics(tensor, files)


def _is_json(value: Any) -> bool:
    if isinstance(value, int):
        # Python raises ValueError for integers of more than 4,300 digits.
        return abs(value) < 2**64
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str)


def _describe_metadata(metadata: Metadata) -> dict[str, Any]:
    """Return the identifying fields. The lists of names are omitted, because they are part of the tensors' kinds."""
    fields = ("run", "run_id", "step", "epoch", "rank", "world_size", "host", "buffers_synced")
    return {field: getattr(metadata, field) for field in fields}


def _compute_statistics(tensor: Tensor, files: Files) -> dict[str, Any]:
    if tensor.refused:
        return dict.fromkeys((*NAMES, "nonfinite"))
    # Fingerprints store the statistics.
    if tensor.digest is not None:
        return {name: getattr(tensor.digest, name) for name in (*NAMES, "nonfinite")}
    moments = compute_moments(tensor, files)
    return moments.values() | {"nonfinite": moments.nonfinite}
