"""syncheck: are the replicas of my model really the same model?

Importing this package imports neither torch nor numpy. Public names are loaded on first use.
"""

from __future__ import annotations

# Importing `typing` would take longer than everything else before the command line handles Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from syncheck.api import compare, diff
    from syncheck.errors import CheckpointError, SyncheckError, UsageError
    from syncheck.options import DiffOptions, Options
    from syncheck.readers.metadata_block import metadata
    from syncheck.readers.open import read
    from syncheck.records import (
        Closure,
        Counts,
        DriftPoint,
        Finding,
        Group,
        OutOfSync,
        Place,
        Replica,
        Report,
        Shards,
        TensorDiff,
        Tie,
        Unreadable,
        ValueDiff,
    )
    from syncheck.snapshots import Snapshot, Tensor

__all__ = [
    "CheckpointError",
    "Closure",
    "Counts",
    "DiffOptions",
    "DriftPoint",
    "Finding",
    "Group",
    "Options",
    "OutOfSync",
    "Place",
    "Replica",
    "Report",
    "Shards",
    "Snapshot",
    "SyncheckError",
    "Tensor",
    "TensorDiff",
    "Tie",
    "Unreadable",
    "UsageError",
    "ValueDiff",
    "compare",
    "diff",
    "metadata",
    "read",
]

# The modules of the names above; every other name is in `records`.
_HOME = {
    "compare": "syncheck.api",
    "DiffOptions": "syncheck.options",
    "Options": "syncheck.options",
    "diff": "syncheck.api",
    "CheckpointError": "syncheck.errors",
    "SyncheckError": "syncheck.errors",
    "UsageError": "syncheck.errors",
    "metadata": "syncheck.readers.metadata_block",
    "read": "syncheck.readers.open",
    "Snapshot": "syncheck.snapshots",
    "Tensor": "syncheck.snapshots",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'syncheck' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME.get(name, "syncheck.records")), name)
    # Python then finds the name without another call.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
