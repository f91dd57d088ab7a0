"""The kinds of values of options: how to recognize a value, and how to read it from the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


# Each generated method of a dataclass takes some 0.15 ms to create, so Kind and Declaration have only `__init__`.
@dataclass(eq=False, repr=False)
class Kind:
    """A kind of value.

    types: the accepted types. parse: reads a value from the command line, or raises ValueError. holds_strings: whether
    the value is a container whose items, or keys, are strings.
    """

    description: str
    types: tuple[type, ...]
    parse: Callable[[str], object] = str
    is_list: bool = False
    holds_strings: bool = False

    def matches(self, value: Any) -> bool:
        """Return whether a value has this kind."""
        # True is an int to Python.
        if isinstance(value, bool):
            return bool in self.types
        if not isinstance(value, self.types):
            return False
        if self.holds_strings:
            items: Any = value
            return all(isinstance(item, str) for item in items)
        return True


_SEQUENCE = (tuple, list)
STRINGS = Kind("a list of strings", _SEQUENCE, is_list=True, holds_strings=True)
PATHS = Kind("a list of paths", _SEQUENCE, is_list=True, holds_strings=True)
PATTERNS = Kind("a list of paths and globs", _SEQUENCE, is_list=True, holds_strings=True)
PATH = Kind("a path", (str,))
PATH_OR_RANK = Kind("a path or a rank", (str, int))
REGEX = Kind("a regular expression", (str,))
CHOICE = Kind("a string", (str,))
INTEGER = Kind("a whole number", (int,), int)
NUMBER = Kind("a number", (float, int), float)
FLAG = Kind("true or false", (bool,))
TABLE = Kind("a table by kind or glob of names", (Mapping,), holds_strings=True)


def make_tuple(value: Any) -> Any:
    """Return a text or a collection as the tuple of an option. Values of wrong types are checked later."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (list, set, frozenset)):
        return tuple(value)
    return value
