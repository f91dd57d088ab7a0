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
        return complex(value)  # without the stand-in's hash
    return Huge(hex(value)) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


def to_text(key: Any) -> str:
    """Return a key as text, like `str`. Raises UnboundedKey for keys with too many parts.

    Sets are sorted, and other objects are printed as their type, because addresses differ between ranks.
    """
    return key if isinstance(key, str) else _write(key, [_MOST_PARTS], 0)


def sort_key(part: Any) -> str:
    """Return a sort key for an element of a set that is equal on all ranks."""
    if isinstance(part, TensorLocation):
        return f"<{part.dtype and part.dtype.name} {part.shape}>"
    return _write(part, [_MOST_PARTS], 0)


def _list_arguments(key: Inert) -> list[Any]:
    """Return what distinguishes an object from others of its class, such as the value of a member of an enum.

    Returns nothing if this is not a few plain values: an object such as a module may have parts without end.
    """
    arguments: list[Any] = []
    for argument in key.arguments:
        # The state of an object is a dictionary of its attributes.
        arguments += argument.items() if isinstance(argument, dict) else [argument]
    if key.items or len(arguments) > _MOST_ARGUMENTS:
        return []

    for argument in arguments:
        parts = argument if isinstance(argument, tuple) else (argument,)
        if not all(isinstance(part, _PLAIN) for part in parts):
            return []
    return arguments


def _write(value: Any, left: list[int], depth: int) -> str:
    left[0] -= 1
    if left[0] < 0 or depth > _MOST_DEEP:
        raise UnboundedKey
    if isinstance(value, (tuple, list, set, frozenset)):
        parts = [_write(part, left, depth + 1) for part in value]
        if isinstance(value, tuple):
            return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        inside = f"{{{', '.join(sorted(parts))}}}" if parts else ""
        return f"frozenset({inside})" if isinstance(value, frozenset) else inside or "set()"
    if isinstance(value, Inert):
        arguments = _list_arguments(value)
        inside = ", ".join(_write(argument, left, depth + 1) for argument in arguments)
        return f"<{value.name}({inside})>" if arguments else f"<{value.name}>"
    if isinstance(value, int):
        return str(to_plain(value))
    if isinstance(value, (str, bytes, bytearray, float, complex, type(None))):
        return repr(value)
    return f"<{getattr(value, 'name', '') or type(value).__name__}>"
