"""What a module saves beside its parameters and buffers, as those of quantized layers do with their weights."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


def own_state(modules: Mapping[str, Any], known: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what the modules' own code adds to a state dict, by name, and what of it was not asked for.

    modules: by path, none of them sharded. known: names that are there already. A class that overrides
    `_save_to_state_dict` is asked for its own part. One with another `state_dict` or with hooks on it is asked only
    where no other rank could be waited for: what it does is its own business, and may be a collective call.
    """
    torch: Any = sys.modules.get("torch")
    added: dict[str, Any] = {}
    unasked: list[str] = []
    if torch is None:
        return added, unasked
    base = torch.nn.Module
    for path, module in modules.items():
        kind = type(module)
        found: dict[str, Any] = {}
        if getattr(kind, "_save_to_state_dict", base._save_to_state_dict) is not base._save_to_state_dict:  # noqa: SLF001
            module._save_to_state_dict(found, "", True)  # noqa: SLF001
        hooked = any(getattr(module, name, None) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
        if hooked or getattr(kind, "state_dict", base.state_dict) is not base.state_dict:
            if world_size() > 1:
                unasked.append(f"{kind.__module__}.{kind.__qualname__}.state_dict()"[:120])
            else:
                found |= module.state_dict()
        at = f"{path}." if path else ""
        added |= {f"{at}{key}": value for key, value in found.items() if f"{at}{key}" not in known}
    return added, unasked
