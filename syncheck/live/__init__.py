"""Check inside a running job that all ranks hold the same model, monitor it, and repair it.

    from syncheck.live import SyncMonitor, check, resync, watch

    report = check(model, optimizer)    # on all ranks

    with SyncMonitor(model, optimizer, every=100) as monitor:    # in a training loop, on all ranks
        ...
        monitor.step()    # once after each optimizer step

    watch()    # on all ranks, before the wrapper is created: observes every step

    resync(model, optimizer)    # on all ranks: copies differing tensors from a healthy rank

Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncheck.live.checks import check
    from syncheck.live.monitor import SyncMonitor
    from syncheck.live.repair import Resync, resync
    from syncheck.live.watching.start import watch

__all__ = ["Resync", "SyncMonitor", "check", "resync", "watch"]

# The module of each name, imported on first access.
_MODULES = {
    "check": "checks",
    "SyncMonitor": "monitor",
    "resync": "repair",
    "Resync": "repair",
    "watch": "watching.start",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'syncheck.live' has no attribute {name!r}")
    return getattr(import_module(f"syncheck.live.{_MODULES[name]}"), name)
