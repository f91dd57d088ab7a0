"""The process group of a rank, created before the test's fixtures, destroyed after all ranks have ended the test."""

from __future__ import annotations

import logging
import random
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncheck.loaded import find_loaded

if TYPE_CHECKING:
    from syncheck.testing import Rank


# Seconds by which the timeout of collectives exceeds the test's time limit, which reports the state of all ranks.
EXTRA_TIMEOUT = 30.0
# Destroyed process groups and their backends.
_destroyed: list[Any] = []


def prepare(task: dict[str, Any]) -> None:
    """Seed the RNGs and join the process group, unless the marker has group=False."""
    # torch discards this logger's messages about failed collectives, but pytest would capture and show them.
    logging.getLogger("c10d-NullHandler-default").disabled = True
    if task["group"]:
        import_module("torch")
    torch = find_loaded("torch")
    random.seed(_seed(task))
    if torch is not None:
        torch.manual_seed(_seed(task))
    numpy = find_loaded("numpy")
    if numpy is not None:
        numpy.random.seed(_seed(task))
    if task["group"]:
        _join(task)


def make_rank(task: dict[str, Any]) -> Rank:
    """Return the value of the fixture `syncheck_rank`."""
    from syncheck.testing import Rank

    return Rank(
        rank=task["rank"],
        world_size=task["world_size"],
        shared=Path(task["shared"]),
        seed=_seed(task),
    )


def _seed(task: dict[str, Any]) -> int:
    """Return the seed of a rank. Equal random weights or data on all ranks would hide missing synchronization."""
    seed: int = task["seed"] + task["rank"]
    return seed


def _join(task: dict[str, Any]) -> None:
    from datetime import timedelta

    dist: Any = import_module("torch.distributed")
    timeout = timedelta(seconds=task["limit"] + EXTRA_TIMEOUT)
    store = dist.FileStore(task["store"], task["world_size"])
    dist.init_process_group(
        "gloo",
        store=store,
        rank=task["rank"],
        world_size=task["world_size"],
        timeout=timeout,
    )


def destroy() -> None:
    """Destroy the process group, if there is one, and release groups without other references.

    A gloo thread releases the callback of a future, such as PowerSGD's, after it has woken the waiting thread. If the
    callback had the last reference to the group, the destructor would join its own thread and abort, usually during
    the next init_process_group. Therefore the references are kept and released here only.
    """
    dist = find_loaded("torch.distributed")
    if dist is not None and dist.is_initialized():
        # Private names of torch, and a group without a CPU backend.
        with suppress(AttributeError, RuntimeError):
            cpu = sys.modules["torch"].device("cpu")
            _destroyed.extend(group._get_backend(cpu) for group in dist.distributed_c10d._world.pg_map)  # noqa: SLF001
            _destroyed.extend(dist.distributed_c10d._world.pg_map)  # noqa: SLF001
        dist.destroy_process_group()
    # Groups before their backends, which they reference.
    for index in reversed(range(len(_destroyed))):
        # One reference is in the list, one is the argument.
        if sys.getrefcount(_destroyed[index]) <= 2:
            del _destroyed[index]


def settings() -> tuple[Any, ...]:
    """Return the current global settings of torch, which a test may change."""
    torch = find_loaded("torch")
    if torch is None:
        return ()
    return (
        torch.get_default_dtype(),
        _device(torch),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        # Of TORCH_DISTRIBUTED_DEBUG at import, or set by the test.
        torch.distributed.get_debug_level(),
    )


def restore(before: tuple[Any, ...]) -> None:
    """Restore the global settings of torch, or its defaults if the test imported torch."""
    torch = find_loaded("torch")
    if torch is None or before == settings():
        return
    dtype, device, grad, deterministic, level = before or (torch.float32, None, True, False, None)
    torch.set_default_dtype(dtype)
    if device != _device(torch):
        torch.set_default_device(device)
    torch.set_grad_enabled(grad)
    torch.use_deterministic_algorithms(deterministic)
    # Ranks at level DETAIL create additional groups, for which ranks at other levels would not join.
    if level is None:
        torch.distributed.set_debug_level_from_env()
    else:
        torch.distributed.set_debug_level(level)


def _device(torch: Any) -> Any:
    """Return the default device, None for the CPU, because setting a default device slows down every call."""
    try:
        device = torch.get_default_device()
    except AttributeError:  # torch 2.6 after set_default_device(None)
        return None
    return None if device == torch.device("cpu") else device
