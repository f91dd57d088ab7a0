"""syncheck: are the replicas of my model really the same model?

Importing this package imports neither torch nor numpy; the names below are loaded when they are used.
"""

from __future__ import annotations

# Not imported from `typing`, because its import would delay the handling of Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from syncheck.api import compare
    from syncheck.errors import CheckpointError, OutOfSync, SyncheckError, UsageError
    from syncheck.metadata_block import metadata
    from syncheck.options import Options
    from syncheck.readers import read
    from syncheck.records import (
        Closure,
        Counts,
        DriftPoint,
        Finding,
        Group,
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
    "DriftPoint",
    "Finding",
    "Group",
    "Options",
    "OutOfSync",
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
    "metadata",
    "read",
]

_HOME = {
    "compare": "syncheck.api",
    "Options": "syncheck.options",
    "CheckpointError": "syncheck.errors",
    "OutOfSync": "syncheck.errors",
    "SyncheckError": "syncheck.errors",
    "UsageError": "syncheck.errors",
    "metadata": "syncheck.metadata_block",
    "read": "syncheck.readers",
    "Snapshot": "syncheck.snapshots",
    "Tensor": "syncheck.snapshots",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'syncheck' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOME.get(name, "syncheck.records")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
