"""Inside a running job: check that all ranks hold the same model, watch it, and repair it.

    from syncheck.live import check

    report = check(model, optimizer)    # on all ranks

and `resync(model, optimizer)` copies what differs from a healthy rank.

Importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncheck.live.checks import check
    from syncheck.live.repair import Resync, resync

__all__ = ["Resync", "check", "resync"]

# Where each name is: imported when it is first asked for.
_MODULES = {"check": "checks", "resync": "repair", "Resync": "repair"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'syncheck.live' has no attribute {name!r}")
    return getattr(import_module(f"syncheck.live.{_MODULES[name]}"), name)
