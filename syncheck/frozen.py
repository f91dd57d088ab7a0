"""Frozen records: dataclasses that take a fifth of the time to create.

`dataclass(frozen=True, slots=True)` compiles six methods for each class, which takes half a millisecond in Python 3.11.
A comparison needs 80 such classes: this was a fifth of its time. `record` compiles only `__init__`, and all records
share the other methods. This module imports nothing of syncheck.
"""

from __future__ import annotations

from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform

_Class = TypeVar("_Class", bound=type)

# The argument of a field with a `default_factory` that the caller omits.
_OMITTED: Any = object()


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: _Class) -> _Class:
    """Make a class a frozen dataclass with slots, with the fields of its annotations.

    `fields`, `replace`, `asdict` and `pickle` work as for other dataclasses. Records are equal if they have the same
    class and equal fields. Methods that the class defines or inherits are kept.
    """
    described: Any = dataclass(init=False, repr=False, eq=False)(cls)
    # A class with slots cannot have class attributes with the same names; fields keep the default values.
    names = {item.name for item in fields(described)} | {"__dict__", "__weakref__"}
    namespace = {name: value for name, value in described.__dict__.items() if name not in names}
    for name, method in _SHARED_METHODS.items():
        if getattr(cls, name, None) is getattr(object, name, None):
            namespace[name] = method
    # Base classes have the slots of inherited fields.
    namespace["__slots__"] = tuple(name for name in cls.__annotations__ if name in described.__dataclass_fields__)
    namespace["__qualname__"] = cls.__qualname__
    namespace["__init__"] = _compile_init(described)
    # Slots and methods belong into a new class: to set each method of a finished class takes longer.
    result: _Class = type(cls)(cls.__name__, cls.__bases__, namespace)
    return result


def _compile_init(cls: Any) -> Any:
    """Return the method `__init__` of a record, which sets all fields."""
    arguments = ["self"]
    lines = []
    names: dict[str, Any] = {"set_field": object.__setattr__, "OMITTED": _OMITTED}
    for item in fields(cls):
        argument = value = item.name
        if item.default is not MISSING:
            names[f"default_{item.name}"] = item.default
            argument = f"{item.name}=default_{item.name}"
        elif item.default_factory is not MISSING:
            names[f"make_{item.name}"] = item.default_factory
            argument = f"{item.name}=OMITTED"
            value = f"make_{item.name}() if {item.name} is OMITTED else {item.name}"
        arguments.append(argument)
        # Assignments would call `__setattr__` of the class, which raises.
        lines.append(f"    set_field(self, {item.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    body = "\n".join(lines)
    # The text consists of field names of syncheck only; default values are looked up in `names`.
    exec(f"def __init__({', '.join(arguments)}):\n{body}", names)  # noqa: S102
    init = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {item.name: item.type for item in fields(cls)} | {"return": None}
    return init


def _values(instance: Any) -> tuple[Any, ...]:
    return tuple(getattr(instance, item.name) for item in fields(instance))


def _equals(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _values(self) == _values(other)


def _hash(self: Any) -> int:
    return hash(tuple(getattr(self, item.name) for item in fields(self) if item.hash is not False))


def _represent(self: Any) -> str:
    texts = [f"{item.name}={getattr(self, item.name)!r}" for item in fields(self)]
    return f"{type(self).__qualname__}({', '.join(texts)})"


def _refuse_assignment(self: Any, name: str, value: object) -> NoReturn:  # noqa: ARG001 - the signature of Python
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: Any, name: str) -> NoReturn:  # noqa: ARG001 - the signature of Python
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _restore(self: Any, values: tuple[Any, ...]) -> None:
    """Set the fields of an unpickled record."""
    for item, value in zip(fields(self), values, strict=True):
        object.__setattr__(self, item.name, value)


_SHARED_METHODS = {
    "__eq__": _equals,
    "__hash__": _hash,
    "__repr__": _represent,
    "__setattr__": _refuse_assignment,
    "__delattr__": _refuse_deletion,
    "__getstate__": _values,
    "__setstate__": _restore,
}
