"""The kinds of values of options: how to recognize a value, and how to read it from the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


# Each generated method of a dataclass takes some 0.15 ms to create, so Kind and Declaration have only `__init__`.
@dataclass(eq=False, repr=False)
class Kind:
    """A kind of value. matches: whether a value has it; parse: reads it from the command line, or raises ValueError."""

    description: str
    matches: Callable[[object], bool]
    parse: Callable[[str], object] = str
    is_list: bool = False


def _is_integer(value: object) -> bool:
    # True is an int to Python.
    return isinstance(value, int) and not isinstance(value, bool)


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_string_or_integer(value: object) -> bool:
    return _is_string(value) or _is_integer(value)


def _is_number(value: object) -> bool:
    return isinstance(value, float) or _is_integer(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_string_list(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


STRINGS = Kind("a list of strings", _is_string_list, is_list=True)
PATHS = Kind("a list of paths", _is_string_list, is_list=True)
PATTERNS = Kind("a list of paths and globs", _is_string_list, is_list=True)
PATH = Kind("a path", _is_string)
PATH_OR_RANK = Kind("a path or a rank", _is_string_or_integer)
REGEX = Kind("a regular expression", _is_string)
CHOICE = Kind("a string", _is_string)
INTEGER = Kind("a whole number", _is_integer, int)
NUMBER = Kind("a number", _is_number, float)
FLAG = Kind("true or false", _is_flag)
TABLE = Kind("a table by kind or glob of names", _is_table)
