"""Nested containers of a replica, as optimizers and schedulers keep them: finding a place in them, and changing it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.live.digest.parts import is_torch
from syncheck.live.memory.held import Held, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    Keys = tuple[Any, ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor as a source has it, without its bytes. beside: it is on the device of the parameter it belongs to."""

    dtype: Any
    shape: tuple[int, ...]
    device: str
    beside: bool


@dataclass(frozen=True, slots=True)
class Own:
    """What is not sent: a rank keeps its own."""


def find(tree: Any, path: str) -> tuple[Keys, Any] | None:
    """Return the keys that lead to a dotted name in nested containers, and what is there; None for nothing."""
    if not path:
        return (), tree
    for key in _keys(tree, path):
        found = find(tree[key], path[len(str(key)) + 1 :])
        if found is not None:
            return (key, *found[0]), found[1]
    return None


def leads_to(tree: Any, path: str) -> Keys:
    """Return the keys of a dotted name as far as there is something."""
    most: Keys = ()
    for key in _keys(tree, path) if path else ():
        found = (key, *leads_to(tree[key], path[len(str(key)) + 1 :]))
        most = max(most, found, key=len)
    return most


def _keys(tree: Any, path: str) -> list[Any]:
    if isinstance(tree, Mapping):
        # A key may have dots itself.
        return sorted((key for key in tree if f"{path}.".startswith(f"{key}.")), key=lambda key: -len(str(key)))
    if isinstance(tree, (list, tuple)):
        first = path.partition(".")[0]
        return [int(first)] if first.isdecimal() and int(first) < len(tree) and first == str(int(first)) else []
    return []


def there(tree: Any, keys: Keys) -> Any:
    """Return what is at the end of some keys; None where they lead nowhere."""
    for key in keys:
        has = key in tree if isinstance(tree, Mapping) else isinstance(tree, (list, tuple)) and key in range(len(tree))
        if not has:
            return None
        tree = tree[key]
    return tree


def list_on(tree: Any, keys: Keys) -> Keys | None:
    """Return the keys of the first list or tuple on the way along some keys, the end included; None if there is none.

    Its elements are named by their positions, so that it is changed as a whole: one without the others has none.
    """
    for i in range(len(keys) + 1):
        if isinstance(tree, (list, tuple)):
            return keys[:i]
        if i < len(keys):
            tree = tree[keys[i]]
    return None


def changed(tree: Any, keys: Keys, value: Any) -> Any:
    """Return containers with a value at a place in them; those on the way are copied, the others stay the same."""
    if not keys:
        return value
    first, rest = keys[0], keys[1:]
    if isinstance(tree, tuple):
        items = list(tree)
        items[first] = changed(items[first], rest, value)
        return _rebuilt(tree, items)
    made = {} if tree is None else copy.copy(tree)
    below = made.get(first) if isinstance(made, Mapping) else made[first]
    made[first] = changed(below, rest, value)
    return made


def without(tree: Any, keys: Keys) -> Any:
    """Return containers without what is at a place in them; those on the way are copied."""
    made = copy.copy(tree)
    if len(keys) > 1:
        made[keys[0]] = without(made[keys[0]], keys[1:])
    else:
        del made[keys[0]]
    return made


def outline(tree: Any, like: Callable[[Any], Like]) -> Any:
    """Return containers and plain values as they are sent: of a tensor what `like` says of it."""
    if is_torch(tree):
        return like(tree)
    if isinstance(tree, Mapping):
        return {key: outline(part, like) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return _rebuilt(tree, [outline(part, like) for part in tree])
    return moved(tree, "cpu") if is_tensor(tree) or isinstance(tree, _PLAIN) else Own()


def filled(plan: Any, own: Any, make: Callable[[Like, str], Any], name: str) -> Any:
    """Return containers as an outline has them. A tensor that `own` has there stays; `make` gives what it lacks.

    name: of the place, with which `make` is called.
    """
    if isinstance(plan, Like):
        return own if fits(own, plan) else make(plan, name)
    if isinstance(plan, Own):
        return own
    if isinstance(plan, dict):
        below = own if isinstance(own, Mapping) else {}
        return {key: filled(part, below.get(key), make, f"{name}.{key}") for key, part in plan.items()}
    if isinstance(plan, (list, tuple)):
        known = list(own) if isinstance(own, (list, tuple)) else []
        padded = known + [None] * (len(plan) - len(known))
        return _rebuilt(plan, [filled(part, padded[i], make, f"{name}.{i}") for i, part in enumerate(plan)])
    return plan


def _rebuilt(old: Any, parts: list[Any]) -> Any:
    """Return parts as a list, a named tuple or a plain one, whichever the old container is."""
    if not isinstance(old, tuple):
        return parts
    return type(old)(*parts) if hasattr(old, "_fields") else tuple(parts)


def fits(own: Any, like: Like) -> bool:
    """Whether a value is a tensor into which the bytes of another one can be copied."""
    return is_tensor(own) and own.dtype == like.dtype and tuple(own.shape) == like.shape


def made_like(like: Like, parameter: Any) -> Any:
    """Return a new tensor as the source has it: of the parameter's strides and mesh where it has its shape."""
    torch: Any = sys.modules["torch"]
    device = like.device
    with torch.inference_mode(mode=False):  # what is made in that mode could not be trained with
        if like.beside and parameter is not None:
            if tuple(parameter.shape) == like.shape:
                return torch.zeros_like(parameter, dtype=like.dtype, requires_grad=False)
            device = parameter.device
        return torch.zeros(like.shape, dtype=like.dtype, device=device)


def moved(value: Any, device: Any) -> Any:
    """Return a value with the tensors in it copied to a device."""
    if is_tensor(value):
        return value.detach().to(device, copy=True) if is_torch(value) else value.copy()
    if type(value) in (dict, list, tuple):
        if isinstance(value, dict):
            return {key: moved(part, device) for key, part in value.items()}
        return type(value)(moved(part, device) for part in value)
    return value


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal in type and content, tensors bit by bit; NaN is equal to itself."""
    if type(first) is not type(second):
        return False
    if is_tensor(first):
        alike = first.dtype == second.dtype and first.shape == second.shape
        return bool(alike) and Held(first)[:] == Held(second)[:]
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second or (first != first and second != second))
