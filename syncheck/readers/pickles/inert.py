"""What a pickle may build of classes that are not known, and in place of OrderedDict: it does nothing."""

from __future__ import annotations

import pickle
from typing import Any

from syncheck.readers.pickles.limits import light


class Inert:
    """An object of an unknown class: remembers what the pickle gave it and does nothing."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep what the pickle gave."""
        light(*args, *kwargs.values())
        self = super().__new__(cls)
        self.given = [*args, *kwargs.values()]
        self.items = {}
        return self

    given: list[Any]
    items: dict[Any, Any]
    known: Any = None
    """What a reader made of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take anything, as a class unknown to us may."""

    def __setstate__(self, state: Any) -> None:
        light(state)
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
        """Stand in for an object that is called to rebuild another."""
        light(*args)
        self.given.extend(args)
        return self

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Ordered(dict[Any, Any]):
    """Stands in for OrderedDict, whose BUILD could set `items` and the like; torch puts `_metadata` there.

    attributes: what BUILD gave; tensors in there are compared.
    """

    __slots__ = ("attributes",)
    attributes: Any

    def __init__(self, *pairs: Any) -> None:
        if pairs:  # torch's have none
            super().__init__(_checked(pairs[0], 1))

    def __setstate__(self, state: Any) -> None:
        """Keep attributes apart from the items."""
        light(state)
        self.attributes = [*getattr(self, "attributes", ()), state]


def _checked(given: Any, deep: int = 0) -> Any:
    """Return what a container is made of, where its parts can be hashed. deep: 1 for pairs of key and value."""
    if not isinstance(given, (list, tuple, dict, set, frozenset)):
        raise pickle.UnpicklingError("a container of something that is none")
    light(*[pair[0] if deep and isinstance(pair, (list, tuple)) and pair else pair for pair in given])
    return given


def set_of(given: Any = ()) -> set[Any]:
    """Stand in for set."""
    return set(_checked(given))


class Frozen(frozenset[Any]):
    """A frozen set with a hash that a file cannot predict."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(frozenset(repr(part) if isinstance(part, (int, float)) else part for part in self))


def frozen_of(given: Any = ()) -> frozenset[Any]:
    """Stand in for frozenset."""
    return Frozen(_checked(given))


class Complex(complex):
    """A complex number whose hash nobody can foresee: of thousands of equal hashes, a dictionary is quadratic."""

    __slots__ = ()

    def __hash__(self) -> int:
        return hash(repr(self + 0))  # of texts, hashes differ from run to run; 0.0 and -0.0 are equal
