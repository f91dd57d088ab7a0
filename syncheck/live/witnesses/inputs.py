"""The tensors that enter a model, also within objects, as in batches of graphs."""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Objects without tensors.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum)
# Objects within objects, like the storage of a batch of graphs.
_MOST_LEVELS = 6
# Objects of the inputs of a forward pass.
_MOST_OBJECTS = 1000


def _has_slots(base: type) -> bool:
    return bool(base.__dict__.get("__slots__"))


class _Unknown(Exception):
    """An object may hold tensors that are not found."""


def list_inputs(inputs: Any) -> list[Any]:
    """Return the tensors of the inputs of a forward pass; none if an object may hold further tensors.

    Some tensors may be equal on all ranks by design, like the edges of a graph whose features are elsewhere.
    """
    tensors: list[Any] = []
    parts = [inputs]
    try:
        # Each level has the parts of the level before.
        for _ in range(_MOST_LEVELS):
            parts = _open_parts(parts, tensors)
    except _Unknown:
        return []
    return [] if parts else tensors


def _open_parts(values: list[Any], tensors: list[Any]) -> list[Any]:
    """Return what some values hold, and add the tensors among them to a list. Raises _Unknown."""
    tensor_class: Any = sys.modules["torch"].Tensor
    parts: list[Any] = []
    for value in values:
        if isinstance(value, tensor_class):
            tensors.append(value.detach())
        elif not isinstance(value, _PLAIN):
            parts += _list_parts(value)
    if len(parts) > _MOST_OBJECTS:
        raise _Unknown
    return parts


def _list_parts(value: Any) -> list[Any]:
    """Return what a container or an object holds. Raises _Unknown."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (Sequence, set, frozenset)):
        return list(value)
    has_slots = any(map(_has_slots, type(value).__mro__))
    # A function may hold tensors in a closure.
    if has_slots or callable(value) or not hasattr(value, "__dict__"):
        raise _Unknown
    return list(value.__dict__.values())
