"""Records, most of them frozen: dataclasses that take a fifth of the time to create.

`dataclass(frozen=True, slots=True)` compiles six methods for each class, which takes half a millisecond in Python 3.11.
A comparison needs 80 such classes: this was a fifth of its time. `record` compiles only `__init__`, and all records
share the other methods. This module imports nothing of syncheck.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from typing import Any, NoReturn, TypeVar, dataclass_transform

_Class = TypeVar("_Class", bound=type)
_Instance = TypeVar("_Instance")

# The argument of a field with a `default_factory` that the caller omits.
_OMITTED: Any = object()


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: _Class) -> _Class:
    """Make a class a frozen dataclass with slots, with the fields of its annotations.

    `fields`, `replace`, `asdict` and `pickle` work as for other dataclasses. Records are equal if they have the same
    class and equal fields. Methods that the class defines or inherits are kept.
    """
    return _make_record(cls, _METHODS | _METHODS_OF_FROZEN)


@dataclass_transform(field_specifiers=(field,))
def mutable_record(cls: _Class) -> _Class:
    """Make a class a dataclass with slots, whose fields can change; otherwise as `record`, without a hash."""
    return _make_record(cls, _METHODS)


def _make_record(cls: _Class, methods: dict[str, Any]) -> _Class:
    described: Any = dataclass(init=False, repr=False, eq=False)(cls)
    namespace = dict(described.__dict__)
    # A class with slots cannot have class attributes with the same names; fields keep the default values.
    for name in (*described.__dataclass_fields__, "__dict__", "__weakref__"):
        namespace.pop(name, None)
    for name, method in methods.items():
        if getattr(cls, name, None) is getattr(object, name, None):
            namespace[name] = method
    # Base classes have the slots of inherited fields.
    namespace["__slots__"] = tuple(name for name in cls.__annotations__ if name in described.__dataclass_fields__)
    namespace["__qualname__"] = cls.__qualname__
    # Slots and methods belong into a new class: to set each method of a finished class takes longer.
    created: Any = type(cls)(cls.__name__, cls.__bases__, namespace)
    created.__init__ = _compile_init(created)
    result: _Class = created
    return result


def _compile_init(cls: Any) -> Any:
    """Return the method `__init__` of a record, which sets the slot of each field.

    For a field x with the default value 0, and a field y with a `default_factory`:

        def __init__(self, x, y):  # the default values are set below
            set_x(self, x)
            set_y(self, make_y() if y is OMITTED else y)
    """
    parameters = ["self"]
    lines = []
    types: dict[str, Any] = {"return": None}
    defaults: list[Any] = []
    scope: dict[str, Any] = {"OMITTED": _OMITTED}
    for item in fields(cls):
        name = value = item.name
        # An assignment would call `__setattr__` of the class, which raises.
        scope[f"set_{name}"] = getattr(cls, name).__set__
        if item.default is not MISSING:
            defaults.append(item.default)
        elif item.default_factory is not MISSING:
            defaults.append(_OMITTED)
            scope[f"make_{name}"] = item.default_factory
            value = f"make_{name}() if {name} is OMITTED else {name}"
        elif defaults:
            raise TypeError(f"{cls.__name__}.{name} follows a field with a default value, and needs one too")
        parameters.append(name)
        types[name] = item.type
        lines.append(f" set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    body = "\n".join(lines)
    # The text consists of field names of syncheck only.
    exec(f"def __init__({', '.join(parameters)}):\n{body}", scope)  # noqa: S102
    init = scope["__init__"]
    init.__defaults__ = tuple(defaults)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = types
    return init


def _values(instance: Any) -> tuple[Any, ...]:
    values = []
    for item in fields(instance):
        values.append(getattr(instance, item.name))
    return tuple(values)


def _equals(self: Any, other: object) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return _values(self) == _values(other)


def _hash(self: Any) -> int:
    values = []
    for item in fields(self):
        # A mapping has no hash.
        if item.hash is not False:
            values.append(getattr(self, item.name))
    return hash(tuple(values))


def _represent(self: Any) -> str:
    texts = []
    for item in fields(self):
        value = getattr(self, item.name)
        texts.append(f"{item.name}={value!r}")
    return f"{type(self).__qualname__}({', '.join(texts)})"


def _refuse_assignment(self: Any, name: str, value: object) -> NoReturn:  # noqa: ARG001 - the signature of Python
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_deletion(self: Any, name: str) -> NoReturn:  # noqa: ARG001 - the signature of Python
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _restore(self: Any, values: tuple[Any, ...]) -> None:
    """Set the fields of an unpickled record."""
    for item, value in zip(fields(self), values, strict=True):
        object.__setattr__(self, item.name, value)


_METHODS = {
    "__eq__": _equals,
    "__repr__": _represent,
    "__getstate__": _values,
    "__setstate__": _restore,
}
_METHODS_OF_FROZEN = {
    "__hash__": _hash,
    "__setattr__": _refuse_assignment,
    "__delattr__": _refuse_deletion,
}


def replace(instance: _Instance, **changes: Any) -> _Instance:
    """Return a record with other values of some fields: the record itself if it has exactly these values."""
    record_instance: Any = instance
    for name, value in changes.items():
        if getattr(record_instance, name) is not value:
            changed: _Instance = dataclasses.replace(record_instance, **changes)
            return changed
    return instance
