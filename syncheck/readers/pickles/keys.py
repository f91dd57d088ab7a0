"""Convert keys of containers to text in bounded time, although shared parts can unfold without bound."""

from __future__ import annotations

from typing import Any

from syncheck.readers.pickles.stand_ins import Inert, TensorLocation

# Limits of one key: its parts, and their nesting.
_MOST_PARTS = 10_000
_MOST_DEEP = 100
# Limit of the arguments of an object that are written into a key.
_MOST_ARGUMENTS = 100
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Bits of the largest integer that a float can represent. Python also limits decimal text to 4,300 digits.
_MOST_BITS = 1023


class Huge(str):
    """Hexadecimal text of an integer beyond the range of floats."""

    __slots__ = ()


class UnboundedKey(Exception):
    """A key has too many parts."""


def to_plain(value: Any) -> Any:
    """Return a value for comparing and printing: integers beyond the range of floats become hexadecimal text."""
    if isinstance(value, complex):
        # Without the stand-in's hash.
        return complex(value)
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return Huge(hex(value))
    return value


def to_text(key: Any) -> str:
    """Return a key as text, like `str`. Raises UnboundedKey for keys with too many parts.

    Sets are sorted, and other objects are printed as their type, because addresses differ between ranks.
    """
    return key if isinstance(key, str) else _Writer().write(key)


def sort_key(part: Any) -> str:
    """Return a sort key for an element of a set that is equal on all ranks."""
    if isinstance(part, TensorLocation):
        dtype_name = part.dtype and part.dtype.name
        return f"<{dtype_name} {part.shape}>"
    return _Writer().write(part)


def _list_arguments(key: Inert) -> list[Any]:
    """Return the mark of an object in a class, for example the value of a member of an enum.

    Returns nothing if this is not a few plain values: an object such as a module may have parts without end.
    """
    arguments: list[Any] = []
    for argument in key.arguments:
        if isinstance(argument, dict):
            # The state of an object is a dictionary of its attributes.
            arguments += argument.items()
        else:
            arguments.append(argument)

    if key.items or len(arguments) > _MOST_ARGUMENTS:
        return []

    are_plain = all(_is_plain(argument) for argument in arguments)
    return arguments if are_plain else []


def _is_plain(argument: Any) -> bool:
    """Whether an argument is a plain value, or a tuple of plain values."""
    if isinstance(argument, tuple):
        return all(isinstance(part, _PLAIN) for part in argument)
    return isinstance(argument, _PLAIN)


class _Writer:
    """Writes one key as text. Raises UnboundedKey for a key with too many parts."""

    def __init__(self) -> None:
        self._remaining_parts = _MOST_PARTS

    def write(self, value: Any, depth: int = 0) -> str:
        """Return a part of the key as text. depth: the number of containers around it."""
        self._remaining_parts -= 1
        if self._remaining_parts < 0 or depth > _MOST_DEEP:
            raise UnboundedKey
        if isinstance(value, (tuple, list, set, frozenset)):
            return _write_container(value, [self.write(part, depth + 1) for part in value])
        if isinstance(value, Inert):
            arguments = [self.write(argument, depth + 1) for argument in _list_arguments(value)]
            return _write_object(value, arguments)
        if isinstance(value, int):
            return str(to_plain(value))
        if isinstance(value, (str, bytes, bytearray, float, complex, type(None))):
            return repr(value)

        type_name = getattr(value, "name", "") or type(value).__name__
        return f"<{type_name}>"


def _write_container(container: Any, parts: list[str]) -> str:
    """Return a container as `repr` does, with the elements of a set in order. parts: the texts of the elements."""
    if isinstance(container, tuple):
        # A tuple of one element ends with a comma.
        end = ",)" if len(parts) == 1 else ")"
        return f"({', '.join(parts)}{end}"
    if isinstance(container, list):
        return f"[{', '.join(parts)}]"

    elements = ", ".join(sorted(parts))
    if isinstance(container, frozenset):
        return f"frozenset({{{elements}}})" if parts else "frozenset()"
    return f"{{{elements}}}" if parts else "set()"


def _write_object(value: Inert, arguments: list[str]) -> str:
    if not arguments:
        return f"<{value.name}>"
    return f"<{value.name}({', '.join(arguments)})>"
