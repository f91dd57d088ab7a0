"""What a thing in memory is, told by what it offers, and what it holds: modules, optimizers, containers, objects."""

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

# Objects that a search for tensors looks at: what holds more, such as a logger with all others, may hold a tensor too.
_MOST_SEARCHED = 20_000


def is_module(thing: Any) -> bool:
    """Whether a thing is a torch module, by what it offers."""
    wanted = ("named_parameters", "named_buffers", "named_modules")
    return not isinstance(thing, type) and all(callable(getattr(thing, name, None)) for name in wanted)


def is_optimizer(thing: Any) -> bool:
    """Whether a thing is an optimizer, by what it offers. Its state dict is none."""
    return (
        not isinstance(thing, Mapping) and isinstance(getattr(thing, "param_groups", None), list) and is_stateful(thing)
    )


def is_bundle(thing: Any) -> bool:
    """Whether a thing is a list or tuple of parts of one replica, such as (model, optimizer)."""
    return isinstance(thing, (list, tuple)) and any(is_module(t) or is_stateful(t) for t in thing)


def has_module(thing: Any) -> bool:
    """Whether a thing is a module, or a container with one at any depth in it."""
    ahead, seen = [thing], set()
    while ahead:
        node = ahead.pop()
        if is_module(node):
            return True
        if id(node) not in seen and not is_tensor(node) and not is_stateful(node):
            seen.add(id(node))
            listed = node if isinstance(node, (list, tuple, deque)) else ()
            ahead += node.values() if isinstance(node, Mapping) else listed or get_attributes(node).values()
    return False


def get_attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object by name: of its `__dict__` and of the `__slots__` of its classes."""
    names = copyreg._slotnames(type(thing))  # type: ignore[attr-defined]  # noqa: SLF001 - as pickle and copy find them
    found = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    own = getattr(thing, "__dict__", None)
    return found | own if isinstance(own, dict) and not isinstance(thing, (type, ModuleType, FunctionType)) else found


def has_tensor(inside: Iterable[Any], known: Container[int] = ()) -> bool:
    """Whether a tensor, or anything that has a state, is in some objects or in whatever these refer to.

    Modules and classes are not looked into, nor the globals of functions. known: ids of objects that are left out.
    """
    ahead, seen = list(inside), set()
    while ahead:
        at = ahead.pop()
        if id(at) in known or id(at) in seen or isinstance(at, (type, ModuleType)):
            continue
        if is_tensor(at) or type(at).__name__ == "UntypedStorage" or is_module(at) or is_stateful(at):
            return True
        seen.add(id(at))
        if len(seen) > _MOST_SEARCHED:
            return True
        ahead += get_referents(at)
    return False


def get_referents(thing: Any) -> list[Any]:
    """Return the objects that one refers to, as the garbage collector sees it, and what a weak reference points at."""
    if isinstance(thing, FunctionType):
        return [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
    if isinstance(thing, weakref.ReferenceType):
        return [thing()]
    if isinstance(thing, dict) and "__builtins__" in thing:  # the globals of a module
        return []
    return gc.get_referents(thing)


def is_readable(thing: Any) -> bool:
    """Whether a thing may hold tensors: a module, whatever has a `state_dict()`, a container or a tensor."""
    return is_module(thing) or is_stateful(thing) or is_tensor(thing) or isinstance(thing, (Mapping, list, tuple))


def class_title(thing: Any) -> str:
    """Name a thing by its class: 'ResNet'; a bundle by its parts: 'ResNet, SGD'."""
    if is_bundle(thing):
        return ", ".join(class_title(part) for part in thing)
    return type(thing).__name__[:40]


def is_stateful(thing: Any) -> bool:
    """Whether a thing has a `state_dict()`; a class has none."""
    return not isinstance(thing, type) and callable(getattr(thing, "state_dict", None))
