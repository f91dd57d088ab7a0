"""Objects in memory: their kind by interface, the state of modules, and tensors inside, without torch imports."""

from __future__ import annotations

import copyreg
import gc
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from syncheck.live.channel import world_size
from syncheck.live.memory.tensor_bytes import holds_shard, is_tensor

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from syncheck.snapshots import NoSync

# The key of `get_extra_state()` in a state dict.
EXTRA_STATE = "_extra_state"
# Limit of a search for tensors. An object that refers to more, like a logger, counts as holding a tensor.
_MOST_SEARCHED = 20_000


def is_module(value: Any) -> bool:
    """Whether an object has the interface of a torch module."""
    methods = ("named_parameters", "named_buffers", "named_modules")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def is_optimizer(value: Any) -> bool:
    """Whether an object has the interface of an optimizer. An optimizer's state dict does not."""
    return (
        not isinstance(value, Mapping) and isinstance(getattr(value, "param_groups", None), list) and is_stateful(value)
    )


def is_bundle(value: Any) -> bool:
    """Whether an object is a list or tuple of parts of one replica, for example (model, optimizer)."""
    return isinstance(value, (list, tuple)) and any(is_module(t) or is_stateful(t) for t in value)


def has_module(value: Any) -> bool:
    """Whether an object is a module, or a container with a module at any depth."""
    pending, seen = [value], set()
    while pending:
        node = pending.pop()
        if is_module(node):
            return True
        if id(node) not in seen and not is_tensor(node) and not is_stateful(node):
            seen.add(id(node))
            listed = node if isinstance(node, (list, tuple, deque)) else ()
            pending += node.values() if isinstance(node, Mapping) else listed or get_attributes(node).values()
    return False


def get_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, from `__dict__` and the `__slots__` of its classes."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle and copy do
    slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
    own = getattr(value, "__dict__", None)
    return slots | own if isinstance(own, dict) and not isinstance(value, (type, ModuleType, FunctionType)) else slots


def has_tensor(inside: Iterable[Any], known: Container[int] = ()) -> bool:
    """Whether some objects are or refer to a tensor, a module, or an object with a state.

    Does not search inside modules, classes or the globals of functions. known: ids of objects to skip.
    """
    pending, seen = list(inside), set()
    while pending:
        node = pending.pop()
        if id(node) in known or id(node) in seen or isinstance(node, (type, ModuleType)):
            continue
        if is_tensor(node) or type(node).__name__ == "UntypedStorage" or is_module(node) or is_stateful(node):
            return True
        seen.add(id(node))
        if len(seen) > _MOST_SEARCHED:
            return True
        pending += get_referents(node)
    return False


def get_referents(value: Any) -> list[Any]:
    """Return the objects that an object refers to, as the garbage collector sees it, including weak references."""
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    if isinstance(value, dict) and "__builtins__" in value:  # the globals of a module
        return []
    return gc.get_referents(value)


def is_readable(value: Any) -> bool:
    """Whether an object may hold tensors: a module, an object with a `state_dict()`, a container or a tensor."""
    return is_module(value) or is_stateful(value) or is_tensor(value) or isinstance(value, (Mapping, list, tuple))


def class_title(value: Any) -> str:
    """Return the class name, 'ResNet', or the class names of a bundle, 'ResNet, SGD'."""
    if is_bundle(value):
        return ", ".join(class_title(part) for part in value)
    return type(value).__name__[:40]


def is_stateful(value: Any) -> bool:
    """Whether an object, not a class, has a `state_dict()`."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


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


def get_no_sync(modules: Iterable[Any]) -> NoSync:
    """Return whether DDP's `no_sync()` is active, or was at the last forward pass of the wrapper.

    modules: a module and its submodules. With fully_shard, gradients that are not reduced do not reach the optimizer at
    all (measured with torch 2.14), so replicas do not diverge.
    """
    for module in modules:
        if type(module).__name__ != "DistributedDataParallel":
            continue
        if getattr(module, "require_backward_grad_sync", True) is False:
            return "active"
        # Set by each forward pass; also by one under torch.no_grad().
        if getattr(module, "require_forward_param_sync", True) is False:
            return "last forward"
    return ""
