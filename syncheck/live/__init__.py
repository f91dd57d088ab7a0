"""Inside a running job: check that all ranks hold the same model, watch it, and repair it.

    from syncheck.live import SyncMonitor, check, resync

    report = check(model, optimizer)    # on all ranks

    with SyncMonitor(model, optimizer, every=100) as monitor:    # in a training loop, on all ranks
        ...
        monitor.step()    # once after each optimizer step

    resync(model, optimizer)    # on all ranks: copies what differs from a healthy one

Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncheck.live.checks import check
    from syncheck.live.monitor import SyncMonitor
    from syncheck.live.repair import Resync, resync

__all__ = ["Resync", "SyncMonitor", "check", "resync"]

# Where each name is: imported when it is first asked for.
_HOME = {"check": "checks", "SyncMonitor": "monitor", "resync": "repair", "Resync": "repair"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'syncheck.live' has no attribute {name!r}")
    return getattr(import_module(f"syncheck.live.{_HOME[name]}"), name)
