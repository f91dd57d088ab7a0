"""A rank's process group: made ready before the test's fixtures, let go when all ranks have ended the test."""

from __future__ import annotations

import logging
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from syncheck.testing import Rank

# Seconds that a collective waits beyond the test's limit: the limit comes first, and shows where each rank stands.
LONGER = 30.0


def prepare(task: dict[str, Any]) -> None:
    """Seed the random number generators and join the process group, unless the test wants to do that itself."""
    if task["group"]:
        import_module("torch")
    torch: Any = sys.modules.get("torch")
    rank = this_rank(task)
    random.seed(rank.seed)
    if torch is not None:
        _defaults(torch)
        torch.manual_seed(rank.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank.seed)
    if task["group"]:
        _join(task)


def this_rank(task: dict[str, Any]) -> Rank:
    """Return what the fixture gives."""
    # Another seed on each rank: equal random weights or data everywhere would hide what is not synchronized.
    return Rank(task["rank"], task["world_size"], Path(task["shared"]), task["seed"] + task["rank"])


def _join(task: dict[str, Any]) -> None:
    from datetime import timedelta

    dist: Any = import_module("torch.distributed")
    timeout = timedelta(seconds=task["limit"] + LONGER)
    store = dist.FileStore(task["store"], task["world_size"])
    dist.init_process_group("gloo", store=store, rank=task["rank"], world_size=task["world_size"], timeout=timeout)


def destroy() -> None:
    """Leave the process group, where there is one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


def _defaults(torch: Any) -> None:
    """Take back what an earlier test in this process may have set for all that follow."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    # Torch logs every failed collective to a logger that is meant to go nowhere, and pytest would show it.
    logging.getLogger("c10d-NullHandler-default").propagate = False
