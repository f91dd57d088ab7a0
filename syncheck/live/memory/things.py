"""What a thing in memory is, told by what it offers: a module, an optimizer, a bundle of parts of one replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from syncheck.live.memory.held import is_tensor


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
        if isinstance(node, (Mapping, list, tuple)) and id(node) not in seen:
            seen.add(id(node))
            ahead += node.values() if isinstance(node, Mapping) else node
    return False


def is_readable(thing: Any) -> bool:
    """Whether a thing may hold tensors: a module, whatever has a `state_dict()`, a container or a tensor."""
    return is_module(thing) or is_stateful(thing) or is_tensor(thing) or isinstance(thing, (Mapping, list, tuple))


def title_of(thing: Any) -> str:
    """Name a thing by its class: 'ResNet'; a bundle by its parts: 'ResNet, SGD'."""
    if is_bundle(thing):
        return ", ".join(title_of(part) for part in thing)
    return type(thing).__name__[:40]


def is_stateful(thing: Any) -> bool:
    """Whether a thing has a `state_dict()`; a class has none."""
    return not isinstance(thing, type) and callable(getattr(thing, "state_dict", None))
