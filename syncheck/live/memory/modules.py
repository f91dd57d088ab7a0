"""What a module tells of itself: sharding, extra state, unsaved buffers, DDP's copying. No torch is imported for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from syncheck.live.memory.held import holds_shard

if TYPE_CHECKING:
    from collections.abc import Mapping

# The key under which torch puts what `get_extra_state()` gives into a state dict.
EXTRA_STATE = "_extra_state"


def is_sharding(module: Any) -> bool:
    """Whether a module is FSDP1's wrapper, whose parameters are plain tensors that hold a shard."""
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    return type(module).__name__ == "FullyShardedDataParallel" and strategy != "NO_SHARD"


def is_sharded(module: Any) -> bool:
    """Whether a module is under FSDP1 or FSDP2, or holds a shard of a tensor."""
    if any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__):
        return True
    return any(holds_shard(p) for p in module.parameters(recurse=False))


def has_extra_state(module: Any) -> bool:
    """Whether a module's class gives an extra state, which its state dict then has."""
    torch: Any = sys.modules.get("torch")
    own = getattr(type(module), "get_extra_state", None)
    return torch is not None and own is not None and own is not torch.nn.Module.get_extra_state


def transient_buffers(modules: Mapping[str, Any]) -> set[str]:
    """Return the names of the buffers that a state dict leaves out. modules: a module and those within, by path."""
    return {
        f"{path}.{name}" if path else name
        for path, owner in modules.items()
        for name in getattr(owner, "_non_persistent_buffers_set", ())
    }


def buffers_synced(module: Any) -> bool | None:
    """Whether DDP copies rank 0's buffers at each forward; None for other modules, which do not say it."""
    if type(module).__name__ != "DistributedDataParallel":
        return None
    # torch 2.15 has the first name, earlier ones have only the second.
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        value = getattr(module, name, None)
        if isinstance(value, bool):
            return value
    return None
