"""The named parts of the containers and objects in a checkpoint's pickle."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from syncheck.messages import Refusal
from syncheck.readers.pickles import keys
from syncheck.readers.pickles.rebuild import NumpyDType
from syncheck.readers.pickles.stand_ins import Compound, Inert, TensorLocation, attributes_of, refused_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

CONTAINERS = (dict, list, tuple, set, frozenset)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container, or None for a leaf."""
    for kind, list_parts in _LISTERS:
        if isinstance(node, kind):
            return list_parts(node)
    return None


def _list_components(tensor: Compound) -> list[tuple[str, Any]] | None:
    """Return the further content of a tensor, or None without any."""
    if not tensor.inner:
        return None
    return children(tensor.inner)


def _list_entries(container: dict[Any, Any]) -> list[tuple[str, Any]]:
    return _name_items(container) + _list_attributes(container)


def _list_members(container: AbstractSet[Any]) -> list[tuple[str, Any]]:
    return _number(_sort_set(container))


def _list_details(dtype: NumpyDType) -> list[tuple[str, Any]]:
    return list(dtype.list_parts().items())


def _list_content(node: Inert) -> list[tuple[str, Any]]:
    return _name_items(node.items) + _list_arguments(node)


def has_parts(node: Any) -> bool:
    """Whether an object may have parts that contain the object itself."""
    if isinstance(node, Compound):
        return bool(node.inner)
    return isinstance(node, (*CONTAINERS, Inert, NumpyDType))


def _name_items(node: dict[Any, Any]) -> list[tuple[str, Any]]:
    return [(keys.to_text(key), value) for key, value in node.items()]


def _number(parts: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(str(number), part) for number, part in enumerate(parts)]


def _list_attributes(node: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the attributes of an OrderedDict."""
    attributes: list[tuple[str, Any]] = []
    for state in getattr(node, "attributes", ()):
        named_values = children(attributes_of(state)) or []
        # torch stores module versions here, which are not part of the model.
        attributes += [(name, value) for name, value in named_values if name != "_metadata"]
    return attributes


def _list_arguments(node: Inert) -> list[tuple[str, Any]]:
    """Return the arguments of an inert object by number, and the entries of dictionaries among them by key."""
    arguments: list[tuple[str, Any]] = []
    for number, argument in enumerate(node.arguments):
        if isinstance(argument, dict):
            arguments += children(argument) or []
        else:
            arguments.append((str(number), argument))
    return arguments


def _sort_set(parts: AbstractSet[Any]) -> list[Any]:
    """Sort a set. Tensors of equal dtype and shape cannot be matched between ranks, and are refused."""
    ordered = sorted(parts, key=keys.sort_key)
    counts = Counter(keys.sort_key(part) for part in ordered if isinstance(part, TensorLocation))
    for i, part in enumerate(ordered):
        if counts[keys.sort_key(part)] > 1:
            location = refused_tensor(Refusal.SET_MEMBER(), part.shape, part.dtype)
            ordered[i] = Compound.wrap(location, None, part)
    return ordered


# The function that returns the parts of a container, by type.
_LISTERS: tuple[tuple[Any, Callable[[Any], list[tuple[str, Any]] | None]], ...] = (
    (Compound, _list_components),
    (dict, _list_entries),
    ((list, tuple), _number),
    ((set, frozenset), _list_members),
    (NumpyDType, _list_details),
    (Inert, _list_content),
)
