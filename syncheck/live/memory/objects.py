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
from syncheck.loaded import find_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from syncheck.snapshots import NoSync

# The key of `get_extra_state()` in a state dict.
EXTRA_STATE = "_extra_state"
# Limit of a search for tensors. An object that refers to more, like a logger, counts as holding a tensor.
_MOST_SEARCHED = 20_000
# Classes and modules of Python, which refer to most of the program.
CODE = (type, ModuleType)
_DDP_CLASS = "DistributedDataParallel"
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


def list_parameters(optimizer: Any) -> list[Any]:
    """Return the parameters of all groups of an optimizer."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters += group.get("params", ())

    return parameters


def list_updated(optimizer: Any) -> list[Any]:
    """Return the parameters that an optimizer has a state of, or that have a gradient: they are or were trained."""
    # What wraps an optimizer may have no state of its own.
    state = getattr(optimizer, "state", {})
    return [parameter for parameter in list_parameters(optimizer) if parameter in state or parameter.grad is not None]


def is_bundle(value: Any) -> bool:
    """Whether an object is a list or tuple of parts of one replica, for example (model, optimizer)."""
    return isinstance(value, (list, tuple)) and any(has_state(part) for part in value)


def has_module(value: Any) -> bool:
    """Whether an object is a module, or a container with a module at any depth."""
    return has_referent(
        [value],
        is_sought=is_module,
        is_skipped=_is_closed,
        most=sys.maxsize,
        list_referents=_list_parts,
    )


def _is_closed(value: Any) -> bool:
    """Whether an object is no module, and holds tensors instead of modules."""
    return not is_module(value) and _holds_tensor(value)


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
    is_code = isinstance(value, (*CODE, FunctionType))
    dictionary = getattr(value, "__dict__", None)
    if isinstance(dictionary, dict) and not is_code:
        attributes |= dictionary

    return attributes


def has_tensor(values: Iterable[Any], skipped: Container[int] = ()) -> bool:
    """Whether some objects are or refer to a tensor, a module, or an object with a state.

    Does not search inside modules, classes or the globals of functions.

    skipped: ids of objects that are not searched.
    """

    def is_skipped(node: Any) -> bool:
        return id(node) in skipped or isinstance(node, CODE)

    return has_referent(
        values,
        is_sought=_holds_tensor,
        is_skipped=is_skipped,
        most=_MOST_SEARCHED,
    )


def get_referents(value: Any) -> list[Any]:
    """Return the objects that an object refers to, as the garbage collector sees it, including weak references."""
    if isinstance(value, FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    if isinstance(value, dict) and "__builtins__" in value:  # the globals of a module
        return []
    return gc.get_referents(value)


def has_referent(
    values: Iterable[Any],
    is_sought: Callable[[Any], bool],
    is_skipped: Callable[[Any], bool],
    most: int,
    list_referents: Callable[[Any], Iterable[Any]] = get_referents,
) -> bool:
    """Whether some objects, or objects to which they refer at any depth, are sought.

    is_sought, is_skipped: functions of an object. What a skipped object refers to is not searched.
    most: number of objects to search. A search that takes longer counts as a success.
    list_referents: a function that returns the objects to which an object refers.
    """
    pending = list(values)
    visited: set[int] = set()
    while pending:
        node = pending.pop()
        if id(node) in visited or is_skipped(node):
            continue

        if is_sought(node) or len(visited) >= most:
            return True

        visited.add(id(node))
        pending += list_referents(node)

    return False


def _holds_tensor(value: Any) -> bool:
    """Whether an object is a tensor or storage, or holds tensors by its interface."""
    return is_tensor(value) or type(value).__name__ == "UntypedStorage" or has_state(value)


def is_readable(value: Any) -> bool:
    """Whether an object may hold tensors: a module, an object with a `state_dict()`, a container or a tensor."""
    return has_state(value) or is_data(value)


def is_data(value: Any) -> bool:
    """Whether an object is a state dict, a container or a tensor."""
    return isinstance(value, (Mapping, list, tuple)) or is_tensor(value)


def class_title(value: Any) -> str:
    """Return the class name, 'ResNet', or the class names of a bundle, 'ResNet, SGD'."""
    if is_bundle(value):
        return ", ".join(class_title(part) for part in value)
    return type(value).__name__[:40]


def is_stateful(value: Any) -> bool:
    """Whether an object, not a class, has a `state_dict()`."""
    return not isinstance(value, type) and callable(getattr(value, "state_dict", None))


def has_state(value: Any) -> bool:
    """Whether an object is a module, or has a `state_dict()`."""
    return is_module(value) or is_stateful(value)


def get_custom_state(modules: Mapping[str, Any], names: Container[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that the modules' own code adds to a state dict, by name, and the methods not called.

    Calls overridden `_save_to_state_dict` methods. Overridden `state_dict` methods and hooks may contain collective
    calls, so with several ranks they are not called.

    modules: by path, without sharded modules.
    names: of entries that exist already.
    """
    added: dict[str, Any] = {}
    not_called: list[str] = []
    for path, module in modules.items():
        state: dict[str, Any] = {}
        if _overrides(module, "_save_to_state_dict"):
            module._save_to_state_dict(state, "", True)  # noqa: SLF001

        if _has_own_state_dict(module):
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


def _overrides(module: Any, method: str) -> bool:
    """Whether the class of a module has its own version of a method of torch's modules. Without torch, none has."""
    torch = find_loaded("torch")
    if torch is None:
        return False

    inherited = getattr(torch.nn.Module, method)
    return getattr(type(module), method, inherited) is not inherited


def _has_own_state_dict(module: Any) -> bool:
    """Whether a module's own `state_dict` method or hooks may add entries."""
    has_hooks = any(getattr(module, name, None) for name in ("_state_dict_hooks", "_state_dict_pre_hooks"))
    return has_hooks or _overrides(module, "state_dict")


def get_wrapped(module: Any) -> Any:
    """Return the model of a DistributedDataParallel module, and any other module itself.

    The names of a model must not depend on what else a rank compares: `normalize` removes the prefix of the wrapper
    only if all names have it.
    """
    return getattr(module, "module", module) if type(module).__name__ == _DDP_CLASS else module


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
    return _overrides(module, "get_extra_state")


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
        if type(module).__name__ != _DDP_CLASS:
            continue
        if getattr(module, "require_backward_grad_sync", True) is False:
            return "active"
        # Set by each forward pass; also by one under torch.no_grad().
        if getattr(module, "require_forward_param_sync", True) is False:
            return "last forward"
    return ""
