"""Keys of a checkpoint's containers as text: in bounded time, though shared parts may unfold without end."""

from __future__ import annotations

from typing import Any

from syncheck.readers.pickles.stand_ins import TensorPlace

# Parts that one key may have, and how deep they may lie in each other.
_MOST_PARTS = 10_000
_MOST_DEEP = 100
# Bits of a number that a float can hold. Larger ones are text: Python does not write more than 4,300 digits either.
_MOST_BITS = 1023


class Huge(str):
    """The hexadecimal text of an integer that no float can hold."""

    __slots__ = ()


class Unending(Exception):
    """A key has too many parts to be written."""


def plain(value: Any) -> Any:
    """Return a value as it is compared and printed: an integer that no float can hold is its hexadecimal text."""
    if isinstance(value, complex):
        return complex(value)  # not a stand-in, which hashes otherwise
    return Huge(hex(value)) if isinstance(value, int) and value.bit_length() > _MOST_BITS else value


def text(key: Any) -> str:
    """Write a key as `str` does. Raises Unending where that would take without end.

    Sets are written in order; what has no text of its own is written by its type: an address is no name.
    """
    return key if isinstance(key, str) else _written(key, [_MOST_PARTS], 0)


def ordering(part: Any) -> str:
    """Return what a part of a set is sorted by: sets have no order of their own; this is the same on every rank."""
    if isinstance(part, TensorPlace):
        return f"<{part.dtype and part.dtype.name} {part.shape}>"
    return _written(part, [_MOST_PARTS], 0)


def _written(value: Any, left: list[int], depth: int) -> str:
    left[0] -= 1
    if left[0] < 0 or depth > _MOST_DEEP:
        raise Unending
    if isinstance(value, (tuple, list, set, frozenset)):
        parts = [_written(part, left, depth + 1) for part in value]
        if isinstance(value, tuple):
            return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
        if isinstance(value, list):
            return f"[{', '.join(parts)}]"
        inside = f"{{{', '.join(sorted(parts))}}}" if parts else ""
        return f"frozenset({inside})" if isinstance(value, frozenset) else inside or "set()"
    if isinstance(value, int):
        return str(plain(value))
    if isinstance(value, (str, bytes, bytearray, float, complex, type(None))):
        return repr(value)
    return f"<{getattr(value, 'name', '') or type(value).__name__}>"
