"""A rank's process group: made ready before the test's fixtures, let go when all ranks have ended the test."""

from __future__ import annotations

import logging
import random
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from syncheck.testing import Rank

# Seconds that a collective waits beyond the test's limit: the limit comes first, and shows where each rank stands.
LONGER = 30.0
_held: list[Any] = []  # process groups that were destroyed, and their backends


def prepare(task: dict[str, Any]) -> None:
    """Seed the random number generators and join the process group, unless the test wants to do that itself."""
    # Torch logs failed collectives to nowhere; pytest 8 shows a logger that propagates, 9.2 one that does not.
    logging.getLogger("c10d-NullHandler-default").disabled = True
    if task["group"]:
        import_module("torch")
    torch: Any = sys.modules.get("torch")
    rank = this_rank(task)
    random.seed(rank.seed)
    if torch is not None:
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
    """Leave the process group, if there is one; release groups that nothing else refers to, here and only here.

    A thread of gloo releases a future's callback, such as PowerSGD's, after the waiting thread was woken. If that has
    the last reference to the group, the destructor joins its own thread: abort, mostly in the next init_process_group.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with suppress(AttributeError, RuntimeError):  # private names of torch; a group without a backend for the CPU
            cpu = sys.modules["torch"].device("cpu")
            _held.extend(group._get_backend(cpu) for group in dist.distributed_c10d._world.pg_map)  # noqa: SLF001
            _held.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
        dist.destroy_process_group()
    for index in reversed(range(len(_held))):  # groups before their backends, to which they refer
        if sys.getrefcount(_held[index]) <= 2:  # the list and the argument
            del _held[index]


def settings() -> tuple[Any, ...]:
    """Return what a test may set in torch for all that follow, as it is now."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ()
    return (
        torch.get_default_dtype(),
        _device(torch),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        _debug_level(torch),
    )


def restore(before: tuple[Any, ...]) -> None:
    """Set that back; torch's own defaults where the test imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or before == settings():
        return
    dtype, device, grad, deterministic, level = before or (torch.float32, None, True, False, None)
    torch.set_default_dtype(dtype)
    if device != _device(torch):
        torch.set_default_device(device)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    if torch.distributed.is_available():
        # At DETAIL a rank joins other groups first, for which ranks at another level would not come.
        if level is None:
            torch.distributed.set_debug_level_from_env()
        else:
            torch.distributed.set_debug_level(level)


def _device(torch: Any) -> Any:
    """Return the default device, None where none is set: setting the CPU would slow every call."""
    try:
        device = torch.get_default_device()
    except AttributeError:  # torch 2.6, once None was set
        return None
    return None if device == torch.device("cpu") else device


def _debug_level(torch: Any) -> Any:
    """Return how much torch.distributed checks: it is read from TORCH_DISTRIBUTED_DEBUG once, or set by the test."""
    return torch.distributed.get_debug_level() if torch.distributed.is_available() else None
