"""Extra state, custom state dicts, non-persistent buffers, FSDP and DDP settings of modules, without torch imports."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size
from syncheck.live.memory.tensor_bytes import holds_shard

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def get_custom_state(modules: Mapping[str, Any], known: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that the modules' own code adds to a state dict, by name, and the methods not called.

    modules: by path, without sharded modules. known: names of entries found before. Calls overridden
    `_save_to_state_dict` methods. Overridden `state_dict` methods and hooks may contain collective calls, so with
    several ranks they are not called.
    """
    torch: Any = sys.modules.get("torch")
    added: dict[str, Any] = {}
    not_called: list[str] = []
    if torch is None:
        return added, not_called
    base = torch.nn.Module
    for path, module in modules.items():
        kind = type(module)
        state: dict[str, Any] = {}
        if getattr(kind, "_save_to_state_dict", base._save_to_state_dict) is not base._save_to_state_dict:  # noqa: SLF001
            module._save_to_state_dict(state, "", True)  # noqa: SLF001
        hooked = any(getattr(module, name, None) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
        if hooked or getattr(kind, "state_dict", base.state_dict) is not base.state_dict:
            if world_size() > 1:
                not_called.append(f"{kind.__module__}.{kind.__qualname__}.state_dict()"[:120])
            else:
                state |= module.state_dict()
        prefix = f"{path}." if path else ""
        added |= {f"{prefix}{key}": value for key, value in state.items() if f"{prefix}{key}" not in known}
    return added, not_called


# The key of `get_extra_state()` in a state dict.
EXTRA_STATE = "_extra_state"


def is_fsdp1(module: Any) -> bool:
    """Whether a module is an FSDP1 wrapper, whose parameters are plain tensors with a shard."""
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    return type(module).__name__ == "FullyShardedDataParallel" and strategy != "NO_SHARD"


def is_sharded(module: Any) -> bool:
    """Whether a module is under FSDP1 or FSDP2, or holds a shard of a tensor."""
    if any(kind.__name__ in ("FSDPModule", "FullyShardedDataParallel") for kind in type(module).__mro__):
        return True
    return any(holds_shard(p) for p in module.parameters(recurse=False))


def has_extra_state(module: Any) -> bool:
    """Whether a module's class defines an extra state, which its state dict contains."""
    torch: Any = sys.modules.get("torch")
    own = getattr(type(module), "get_extra_state", None)
    return torch is not None and own is not None and own is not torch.nn.Module.get_extra_state


def get_transient_buffers(modules: Mapping[str, Any]) -> set[str]:
    """Return the names of non-persistent buffers. modules: a module and its submodules, by path."""
    return {
        f"{path}.{name}" if path else name
        for path, owner in modules.items()
        for name in getattr(owner, "_non_persistent_buffers_set", ())
    }


def get_buffers_synced(module: Any) -> bool | None:
    """Whether DDP copies rank 0's buffers at each forward; None for other modules."""
    if type(module).__name__ != "DistributedDataParallel":
        return None
    # torch 2.15 has the first name, older versions only the second.
    for name in ("forward_sync_buffers", "broadcast_buffers"):
        value = getattr(module, name, None)
        if isinstance(value, bool):
            return value
    return None
