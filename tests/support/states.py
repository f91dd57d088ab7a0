"""State dicts, and other mappings, that differ from another one in a single respect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def copy_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with copies of the tensors or arrays."""
    return {name: value.clone() if hasattr(value, "clone") else value.copy() for name, value in state.items()}


def cast(state: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Return a state with arrays of another dtype."""
    return {name: array.astype(dtype) for name, array in state.items()}


def add_prefix(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return a state whose names start with a prefix."""
    return {f"{prefix}{name}": value for name, value in state.items()}


def replace_in_names(state: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a state with a part of its names replaced."""
    return {name.replace(old, new): value for name, value in state.items()}


def merge(mappings: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return the entries of all mappings; for a key in several mappings, the last value."""
    merged: dict[Any, Any] = {}
    for mapping in mappings:
        merged |= mapping
    return merged


def pick(mapping: Mapping[Any, Any], keys: Iterable[Any]) -> dict[Any, Any]:
    """Return the entries of these keys."""
    return {key: mapping[key] for key in keys}


def omit(mapping: Mapping[Any, Any], *keys: Any) -> dict[Any, Any]:
    """Return a mapping without some keys."""
    return {key: value for key, value in mapping.items() if key not in keys}


def omit_prefixes(mapping: Mapping[str, Any], prefixes: str | tuple[str, ...]) -> dict[str, Any]:
    """Return a mapping, such as the environment, without the names that start with a prefix."""
    return {name: value for name, value in mapping.items() if not name.startswith(prefixes)}


def list_differing(state: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return the names of a state's tensors that are not equal to the expected tensors."""
    return [name for name in state if not state[name].equal(expected[name])]


def find_largest_difference(state: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest absolute difference over all tensors of a state."""
    return max((state[name] - expected[name]).abs().max().item() for name in state)


def are_equal(tensors: Iterable[Any], expected: Iterable[Any]) -> bool:
    """Return whether each tensor equals the expected tensor. Raises ValueError for another number of tensors."""
    return all(tensor.equal(other) for tensor, other in zip(tensors, expected, strict=True))


def clone_parameters(model: Any) -> list[Any]:
    """Return copies of a model's parameters, without their graph."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def count_elements(tensors: Iterable[Any]) -> int:
    """Return the number of elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)
