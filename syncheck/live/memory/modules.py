"""What a module tells of itself: sharding, extra state, unsaved buffers, DDP's copying. No torch is imported for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size
from syncheck.live.memory.tensor_bytes import holds_shard

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def get_custom_state(modules: Mapping[str, Any], known: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what the modules' own code adds to a state dict, by name, and what of it was not asked for.

    modules: by path, none of them sharded. known: names that are there already. A class that overrides
    `_save_to_state_dict` is asked for its own part. One with another `state_dict` or with hooks on it is asked only
    where no other rank could be waited for: what it does is its own business, and may be a collective call.
    """
    torch: Any = sys.modules.get("torch")
    added: dict[str, Any] = {}
    not_called: list[str] = []
    if torch is None:
        return added, not_called
    base = torch.nn.Module
    for path, module in modules.items():
        kind = type(module)
        found: dict[str, Any] = {}
        if getattr(kind, "_save_to_state_dict", base._save_to_state_dict) is not base._save_to_state_dict:  # noqa: SLF001
            module._save_to_state_dict(found, "", True)  # noqa: SLF001
        hooked = any(getattr(module, name, None) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
        if hooked or getattr(kind, "state_dict", base.state_dict) is not base.state_dict:
            if world_size() > 1:
                not_called.append(f"{kind.__module__}.{kind.__qualname__}.state_dict()"[:120])
            else:
                found |= module.state_dict()
        at = f"{path}." if path else ""
        added |= {f"{at}{key}": value for key, value in found.items() if f"{at}{key}" not in known}
    return added, not_called


# The key under which torch puts what `get_extra_state()` gives into a state dict.
EXTRA_STATE = "_extra_state"


def is_fsdp1(module: Any) -> bool:
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


def get_transient_buffers(modules: Mapping[str, Any]) -> set[str]:
    """Return the names of the buffers that a state dict leaves out. modules: a module and those within, by path."""
    return {
        f"{path}.{name}" if path else name
        for path, owner in modules.items()
        for name in getattr(owner, "_non_persistent_buffers_set", ())
    }


def get_buffers_synced(module: Any) -> bool | None:
    """Whether DDP copies rank 0's buffers at each forward; None for other modules, which do not say it."""
    if type(module).__name__ != "DistributedDataParallel":
        return None
    # torch 2.15 has the first name, earlier ones have only the second.
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        value = getattr(module, name, None)
        if isinstance(value, bool):
            return value
    return None
