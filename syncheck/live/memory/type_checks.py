"""Classify objects in memory by their interface (module, optimizer, container), and find tensors inside them."""

from __future__ import annotations

import copyreg
import gc
import weakref
from collections import deque
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from syncheck.live.memory.tensor_bytes import is_tensor

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

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
