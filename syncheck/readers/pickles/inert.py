"""Inert replacements for objects of unknown classes, for containers, and for types with predictable hashes."""

from __future__ import annotations

import pickle
from typing import Any

from syncheck.readers.pickles.limits import check_nesting


class Inert:
    """An object of an unknown class, which only keeps its arguments and state."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep the arguments."""
        check_nesting(*args, *kwargs.values())
        self = super().__new__(cls)
        self.given = [*args, *kwargs.values()]
        self.items = {}
        return self

    given: list[Any]
    items: dict[Any, Any]
    known: Any = None
    """A cache for a reader's interpretation of the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments."""

    def __setstate__(self, state: Any) -> None:
        check_nesting(state)
        self.given.append(state)

    def append(self, item: Any) -> None:
        """Stand in for list.append (opcode APPEND)."""
        self.given.append(item)

    def extend(self, items: Any) -> None:
        """Stand in for list.extend (opcode APPENDS)."""
        self.given.extend(items)

    def add(self, item: Any) -> None:
        """Stand in for set.add (opcode ADDITEMS)."""
        self.given.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __call__(self, *args: Any) -> Inert:
        """Stand in for a call that rebuilds another object."""
        check_nesting(*args)
        self.given.extend(args)
        return self

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Ordered(dict[Any, Any]):
    """Stand in for OrderedDict, whose BUILD could overwrite methods like `items`; torch stores `_metadata` there.

    attributes: states set by BUILD; tensors in them are compared.
    """

    __slots__ = ("attributes",)
    attributes: Any

    def __init__(self, *pairs: Any) -> None:
        if pairs:  # torch passes none
            super().__init__(_check_elements(pairs[0], 1))

    def __setstate__(self, state: Any) -> None:
        """Keep attributes separate from the items."""
        check_nesting(state)
        self.attributes = [*getattr(self, "attributes", ()), state]


def _check_elements(given: Any, deep: int = 0) -> Any:
    """Return the elements for a container after checking their nesting. deep: 1 for pairs of key and value."""
    if not isinstance(given, (list, tuple, dict, set, frozenset)):
        raise pickle.UnpicklingError("a container with invalid content")
    check_nesting(*[pair[0] if deep and isinstance(pair, (list, tuple)) and pair else pair for pair in given])
    return given


def make_set(given: Any = ()) -> set[Any]:
    """Stand in for set."""
    return set(_check_elements(given))


class Frozen(frozenset[Any]):
    """A frozenset with unpredictable hashes, so that a file cannot contain many with equal hashes."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(frozenset(repr(part) if isinstance(part, (int, float)) else part for part in self))


def make_frozenset(given: Any = ()) -> frozenset[Any]:
    """Stand in for frozenset."""
    return Frozen(_check_elements(given))


class Complex(complex):
    """A complex number with an unpredictable hash, so that a file cannot contain many with equal hashes."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(repr(self + 0))  # hashes of strings are randomized; + 0 makes -0.0 equal to 0.0
