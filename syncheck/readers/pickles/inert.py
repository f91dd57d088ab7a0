"""What stands for an object of an unknown class: inert, so that the tensors in it are still found."""

from __future__ import annotations

from typing import Any

from syncheck.errors import brief


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

    def __repr__(self) -> str:
        """Write a name that is the same on every rank: objects are keys of dictionaries, and members of sets."""
        plain = [brief(value) for value in self.given if isinstance(value, (str, int, float))]
        return f"<{self.name}({', '.join(plain[:3])})>"

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
