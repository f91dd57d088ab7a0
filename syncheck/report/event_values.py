"""The values of an event, read from JSON: lists, numbers and choices, or a ValueError."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from syncheck.snapshots import MOST_ELEMENTS, are_naturals
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.report.selections import Item


def read_list(values: Any, read: Callable[[Any], Item]) -> tuple[Item, ...]:
    """Return the items of a list. read: converts an item, or raises ValueError, as this does for what is no list."""
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"{brief(values)} is not a list")
    return tuple(map(read, values))


def read_naturals(value: Any) -> tuple[int, ...]:
    """Return a list of ranks or sizes. Raises ValueError for any other value."""
    return read_list(value, read_natural)


def read_index(value: Any) -> tuple[int, ...] | None:
    """Return the index of an element; None for a tensor without a measured difference."""
    return None if value is None else read_naturals(value)


def read_sets(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return sets of ranks. Raises ValueError unless the value is a list of lists."""
    return read_list(value, read_naturals)


def read_natural(value: Any) -> int:
    """Return a step, rank or count. Raises ValueError for numbers that are infinite, negative, or above any run."""
    if not are_naturals([value]):
        raise ValueError(f"{brief(value)} is not a number from 0 to {MOST_ELEMENTS}")
    return int(value)


def read_size(value: Any) -> Any:
    """Return the size of a difference, None if it is unknown. Raises ValueError unless it is a finite number."""
    if value is None:
        return None
    # `True` is an integer of Python, and its JSON may have NaN and Infinity.
    if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{brief(value)} is not a finite number")
    return value


def read_choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """Return a value of a field. Raises ValueError for other values."""
    # The file may be of a later version, or no file of a monitor.
    if value not in choices:
        raise ValueError(f"{name} {brief(value)}")
    return value
