"""What a pickle may build of classes that are not known, and in place of OrderedDict: it does nothing."""

from __future__ import annotations

from typing import Any


class Inert:
    """An object of an unknown class: remembers what the pickle gave it and does nothing."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep what the pickle gave."""
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
        self.given.extend(args)
        return self

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Ordered(dict[Any, Any]):
    """Stands in for OrderedDict, whose BUILD could set `items` and the like; torch puts `_metadata` there."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Take no attribute: none is compared."""
