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
_FSDP_CLASSES = ("FSDPModule", "FullyShardedDataParallel")


def add_dot(path: str) -> str:
    """Return the prefix of the names in a module or container; empty for the root."""
    return f"{path}." if path else ""


def is_module(value: Any) -> bool:
    """Whether an object has the interface of a torch module."""
    methods = ("named_parameters", "named_buffers", "named_modules")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in methods)


def is_optimizer(value: Any) -> bool:
    """Whether an object has the interface of an optimizer. An optimizer's state dict does not."""
    if isinstance(value, Mapping):
        return False

    return isinstance(getattr(value, "param_groups", None), list) and is_stateful(value)


def is_bundle(value: Any) -> bool:
    """Whether an object is a list or tuple of parts of one replica, for example (model, optimizer)."""
    return isinstance(value, (list, tuple)) and any(is_module(part) or is_stateful(part) for part in value)


def has_module(value: Any) -> bool:
    """Whether an object is a module, or a container with a module at any depth."""
    pending = [value]
    visited: set[int] = set()
    while pending:
        node = pending.pop()
        if is_module(node):
            return True

        is_closed = is_tensor(node) or is_stateful(node)
        if id(node) not in visited and not is_closed:
            visited.add(id(node))
            pending += _list_parts(node)

    return False


def _list_parts(value: Any) -> Iterable[Any]:
    """Return the items of a container, or the attributes of another object."""
    if isinstance(value, Mapping):
        return value.values()

    # A subclass of a list may be empty and have attributes.
    if isinstance(value, (list, tuple, deque)) and value:
        return value

    return get_attributes(value).values()


def get_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, from `__dict__` and the `__slots__` of its classes."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle and copy do
    attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
    # The attributes of code are most of the program.
    is_code = isinstance(value, (type, ModuleType, FunctionType))
    dictionary = getattr(value, "__dict__", None)
    if isinstance(dictionary, dict) and not is_code:
        attributes |= dictionary

    return attributes


def has_tensor(values: Iterable[Any], skipped: Container[int] = ()) -> bool:
    """Whether some objects are or refer to a tensor, a module, or an object with a state.

    Does not search inside modules, classes or the globals of functions.

    skipped: ids of objects that are not searched.
    """
    pending = list(values)
    visited: set[int] = set()
    while pending:
        node = pending.pop()
        is_skipped = id(node) in visited or id(node) in skipped
        if is_skipped or isinstance(node, (type, ModuleType)):
            continue

        if _holds_tensor(node):
            return True

        visited.add(id(node))
        # A search that takes too long counts as a tensor.
        if len(visited) > _MOST_SEARCHED:
            return True

        pending += get_referents(node)

    return False


def _holds_tensor(value: Any) -> bool:
    """Whether an object is a tensor or storage, or holds tensors by its interface."""
    if is_tensor(value) or type(value).__name__ == "UntypedStorage":
        return True

    return is_module(value) or is_stateful(value)


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


def get_custom_state(modules: Mapping[str, Any], names: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that the modules' own code adds to a state dict, by name, and the methods not called.

    Calls overridden `_save_to_state_dict` methods. Overridden `state_dict` methods and hooks may contain collective
    calls, so with several ranks they are not called.

    modules: by path, without sharded modules.
    names: of entries that exist already.
    """
    torch: Any = sys.modules.get("torch")
    added: dict[str, Any] = {}
    not_called: list[str] = []
    if torch is None:
        return added, not_called

    for path, module in modules.items():
        state: dict[str, Any] = {}
        if _overrides(module, "_save_to_state_dict", torch):
            module._save_to_state_dict(state, "", True)  # noqa: SLF001

        if _has_own_state_dict(module, torch):
            if world_size() > 1:
                kind = type(module)
                not_called.append(f"{kind.__module__}.{kind.__qualname__}.state_dict()"[:120])
            else:
                state |= module.state_dict()

        for key, value in state.items():
            name = f"{add_dot(path)}{key}"
            # The entries of submodules come again with the state dict of the whole module.
            if name not in names:
                added[name] = value

    return added, not_called


def _overrides(module: Any, method: str, torch: Any) -> bool:
    """Whether the class of a module has its own version of a method of torch's modules."""
    inherited = getattr(torch.nn.Module, method)
    return getattr(type(module), method, inherited) is not inherited


def _has_own_state_dict(module: Any, torch: Any) -> bool:
    """Whether a module's own `state_dict` method or hooks may add entries."""
    has_hooks = any(getattr(module, name, None) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
    return has_hooks or _overrides(module, "state_dict", torch)


def is_fsdp1(module: Any) -> bool:
    """Whether a module is an FSDP1 wrapper, whose parameters are plain tensors with a shard."""
    # With NO_SHARD, the parameters are complete, as under DDP.
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    return type(module).__name__ == "FullyShardedDataParallel" and strategy != "NO_SHARD"


def is_sharded(module: Any) -> bool:
    """Whether a module is under FSDP1 or FSDP2, or holds a shard of a tensor."""
    class_names = {kind.__name__ for kind in type(module).__mro__}
    if not class_names.isdisjoint(_FSDP_CLASSES):
        return True

    return any(holds_shard(parameter) for parameter in module.parameters(recurse=False))


def has_extra_state(module: Any) -> bool:
    """Whether a module's class defines an extra state, which its state dict contains."""
    torch: Any = sys.modules.get("torch")
    method = getattr(type(module), "get_extra_state", None)
    if torch is None or method is None:
        return False

    return method is not torch.nn.Module.get_extra_state


def get_transient_buffers(modules: Mapping[str, Any]) -> set[str]:
    """Return the names of non-persistent buffers. modules: a module and its submodules, by path."""
    names: set[str] = set()
    for path, owner in modules.items():
        for name in getattr(owner, "_non_persistent_buffers_set", ()):
            names.add(f"{add_dot(path)}{name}")

    return names


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
