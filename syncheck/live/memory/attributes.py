"""Read the plain attributes of modules: tensors, numbers and texts that are neither parameters nor buffers.

Attributes are read as data: from `__dict__` and slots, never through properties, `__getattr__` or methods of a class,
so that no code of the user runs. Numbers and texts are values; a tensor becomes a text of its dtype, shape and digest.
An object that cannot be read is listed with its class.
"""

from __future__ import annotations

import enum
import hashlib
import re
import sys
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FunctionType, MemberDescriptorType, NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.digest import digest_all
from syncheck.live.memory.objects import CODE, add_dot, has_referent
from syncheck.live.memory.origins import is_unread_class, list_internal_names, list_packages, reads_only_values
from syncheck.live.memory.tensor_bytes import describe_tensor
from syncheck.tensors.value_kinds import METRIC, is_own_name

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from syncheck.live.memory.tensor_bytes import MemoryTensor

# Limits, so that a replay buffer or a vocabulary in an attribute does not take longer than the model itself.
_MOST_PARTS = 20_000  # of all attributes
_MOST_ITEMS = 2_000  # of a container of tensors, objects and other containers
_MOST_PLAIN = 20_000  # of a container of numbers and texts
_MOST_BYTES = 256 << 20  # of all tensors in attributes
_MOST_DEPTH = 20
_MOST_TEXT = 120  # characters
_MOST_SEARCHED = 1_000  # objects behind a function or an iterator

_NUMBERS = (bool, int, float, complex)
_PLAIN = (*_NUMBERS, str, bytes, bytearray)
_PLAIN_OR_NONE = (*_PLAIN, NoneType)
_PLAIN_BASES = (*_PLAIN, enum.Enum)
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
_CONTAINERS = (dict, *_LISTS, *_SETS)
# Classes without attributes, or with attributes of Python only.
_WITHOUT_FIELDS = (FunctionType, *_CONTAINERS)
# The modules of functions, iterators and references, which are searched for tensors.
_PYTHON_MODULES = frozenset({"builtins", "functools", "weakref", "collections"})
# The number of a device is that of the rank.
_DEVICE = re.compile(r"(cuda|xpu|hpu|npu|mps|cpu):\d+")


class Part(NamedTuple):
    """A value to read.

    name: its path in the model.
    depth: the number of containers around it.
    """

    name: str
    value: Any
    depth: int


@dataclass
class Attributes:
    """The plain attributes of the modules of one rank.

    values: numbers and texts, by path.
    unread: paths with their classes.
    trained: parameters that the optimizer updates, by path.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    trained: dict[str, Any] = field(default_factory=dict)


class AttributeReader:
    """Reads the attributes of modules.

    compared: ids of the objects that are compared anyway, like parameters.
    optimized: ids of the parameters of the optimizers.
    """

    def __init__(self, compared: Container[int], optimized: Container[int]) -> None:
        self._compared = compared
        self._optimized = optimized
        self._opened: dict[int, Any] = {}  # with the objects, because ids are unique only among live objects
        self._tensors: list[tuple[str, MemoryTensor]] = []
        self._parts = 0
        self.attributes = Attributes()

    def read_module(self, path: str, module: Any) -> None:
        """Read the attributes of a module.

        path: of the module, empty for a root.
        """
        prefix = add_dot(path)
        attributes = _list_attributes(module)
        metric_states = _list_metric_states(module)
        if metric_states is not None:
            prefix = f"{METRIC}{prefix}"
            # The other attributes of a metric are its counters and caches.
            attributes = {name: value for name, value in attributes.items() if name in metric_states}

        is_layer = reads_only_values(module)
        for name, value in attributes.items():
            # torch's layers hold functions and objects that are no part of the model.
            is_tool = is_layer and not _is_value(value)
            if not is_tool:
                self._walk(Part(f"{prefix}{name}", value, 0))

    def finish(self) -> Attributes:
        """Return the attributes, after the digests of all tensors have been computed."""
        hashed: list[tuple[str, MemoryTensor]] = []
        sources: list[Any] = []
        remaining_bytes = _MOST_BYTES
        for name, tensor in self._tensors:
            source: Any = getattr(tensor.content, "source", None)
            remaining_bytes -= source.nbytes
            if remaining_bytes < 0:
                self.attributes.unread.append(f"{name} (a tensor of {source.nbytes} bytes)")
                continue

            hashed.append((name, tensor))
            sources.append(source)

        # Tensors of a set have one name and no order.
        texts: dict[str, list[str]] = defaultdict(list)
        for (name, tensor), (_, digest) in zip(hashed, digest_all(sources), strict=True):
            texts[name].append(f"{_format_tensor(tensor)} #{digest.hex()[:8]}")
        for name, texts_of_name in texts.items():
            self.attributes.values[name] = _shorten(", ".join(sorted(texts_of_name)))

        return self.attributes

    def _walk(self, first: Part) -> None:
        """Read an attribute and everything below it."""
        pending = [first]
        while pending:
            part = pending.pop()
            if part.depth > _MOST_DEPTH or self._parts > _MOST_PARTS:
                self._list_unread(part)
                return

            self._parts += 1
            # The first part of a container is read first.
            pending += reversed(self._read(part))

    def _read(self, part: Part) -> list[Part]:
        """Read one value; return the parts in it."""
        value = part.value
        if _is_plain(value):
            self.attributes.values[part.name] = _make_plain(value)
            return []
        # An object with two names is read under the first of them.
        if self._is_read(value):
            return []
        if _is_tensor(value):
            self._add_tensor(part.name, value)
            return []

        return self._open(part)

    def _is_read(self, value: Any) -> bool:
        """Whether an object is compared anyway, or was read under another name."""
        return id(value) in self._compared or id(value) in self._opened

    def _open(self, part: Part) -> list[Part]:
        """Return the parts of a container, module or object."""
        depth = part.depth + 1
        items = self._list_parts(part)
        return [Part(f"{part.name}.{key}", item, depth) for key, item in items if not is_own_name(key)]

    def _list_parts(self, part: Part) -> Iterable[tuple[str, Any]]:
        """Return the parts of a container, module or object with their keys."""
        value = part.value
        kind = type(value)
        if issubclass(kind, _CONTAINERS):
            return self._read_container(part)
        if _is_module(value):
            return _list_module_items(value)
        if issubclass(kind, CODE) or is_unread_class(kind):
            return []

        fields = read_fields(value)
        # Functions, iterators and objects of extensions have no attributes that can be read.
        if not fields:
            self._search(part)

        return fields.items()

    def _read_container(self, part: Part) -> list[tuple[str, Any]]:
        """Read a container of plain values as one value; return the items of another container."""
        value = part.value
        fields = read_fields(value)
        if len(value) <= _MOST_PLAIN and not fields and _is_plain_container(value):
            text = f"{type(value).__name__} {_format_container(value)}"
            self.attributes.values[part.name] = _shorten(text)
            return []

        self._opened[id(value)] = value
        if len(value) > _MOST_ITEMS:
            self._list_unread(part)
            return []

        # A subclass may have attributes beside its items.
        return [*_list_items(value), *fields.items()]

    def _search(self, part: Part) -> None:
        """List a value without attributes if a tensor is behind it, or if its class is unknown."""
        is_python = type(part.value).__module__ in _PYTHON_MODULES
        if not is_python or self._hides_tensor(part.value):
            self._list_unread(part)

        self._opened[id(part.value)] = part.value

    def _hides_tensor(self, value: Any) -> bool:
        """Whether a function, an iterator or the like refers to a tensor or module that is not compared."""

        def is_skipped(node: Any) -> bool:
            return self._is_read(node) or issubclass(type(node), CODE)

        return has_referent(
            [value],
            is_sought=_is_tensor_or_module,
            is_skipped=is_skipped,
            most=_MOST_SEARCHED,
        )

    def _add_tensor(self, name: str, value: Any) -> None:
        """Add a tensor; a parameter that the optimizer trains belongs to the model, wherever it is held."""
        if id(value) in self._optimized:
            self.attributes.trained[name] = value
            return

        tensor = describe_tensor(value)
        if tensor.content is not None and tensor.sharding is None:
            self._tensors.append((name, tensor))
            return

        # Shards differ by design, and other tensors are refused with a reason.
        self.attributes.values[name] = _format_tensor(tensor)
        if tensor.refused:
            self.attributes.unread.append(f"{name} ({tensor.refused})")

    def _list_unread(self, part: Part) -> None:
        """Add a value to those that cannot be read, with its class."""
        kind = type(part.value)
        text = f"{part.name} ({kind.__module__}.{kind.__qualname__})"
        self.attributes.unread.append(text[:_MOST_TEXT])


def read_fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object from its `__dict__` and slots, without properties and special names."""
    kind: Any = type(value)
    if kind in _WITHOUT_FIELDS:
        return {}

    fields: dict[str, Any] = {}
    for name, descriptor in _list_slots(kind).items():
        with suppress(AttributeError):  # a slot without a value
            fields[name] = descriptor.__get__(value, kind)
    try:
        fields |= object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):  # no dictionary, or one of another kind
        return fields

    return {name: item for name, item in fields.items() if isinstance(name, str) and not name.startswith("__")}


@lru_cache(maxsize=1024)
def _list_slots(kind: type) -> Mapping[str, Any]:
    """Return the descriptors of the slots of a class, which read memory and run no code of the class."""
    slots: dict[str, Any] = {}
    for base in kind.__mro__:
        for name, descriptor in vars(base).items():
            # A derived class comes first, and hides the slots of its bases.
            if type(descriptor) is MemberDescriptorType and not name.startswith("__"):
                slots.setdefault(name, descriptor)

    return slots


def describe_modes(modules: Mapping[str, Any]) -> str:
    """Return which modules are in training mode: 'on', 'off', or the modules in which it is off.

    modules: by path.
    """
    modules_off = [path or "(root)" for path, module in modules.items() if vars(module).get("training") is False]
    if not modules_off:
        return "on"
    if len(modules_off) == len(modules):
        return "off"

    return _shorten(f"off in {', '.join(modules_off)}")


def _list_attributes(module: Any) -> dict[str, Any]:
    """Return the attributes of a module that neither torch nor Python sets, and that may be equal on all ranks."""
    internal_names = list_internal_names()
    attributes: dict[str, Any] = {}
    for name, value in vars(module).items():
        is_internal = name in internal_names or name.startswith("__")
        if not is_internal and not is_own_name(name):
            attributes[name] = value

    return attributes


def _list_metric_states(module: Any) -> Container[str] | None:
    """Return the names of the states of a metric of torchmetrics, None if the module is no metric."""
    kind: Any = type(module)
    states = vars(module).get("_defaults")
    if isinstance(states, dict) and "torchmetrics" in list_packages(kind):
        return states

    return None


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None or a member of an enumeration, without running its code."""
    kind = type(value)
    # The exact classes first, because most values are of them.
    if kind in _PLAIN_OR_NONE:
        return True

    return issubclass(kind, _PLAIN_BASES) or _is_of_package(kind, "numpy", "generic")


def _is_tensor(value: Any) -> bool:
    """Whether a value is a tensor or an array."""
    kind = type(value)
    return _is_of_package(kind, "torch", "Tensor") or _is_of_package(kind, "numpy", "ndarray")


def _is_module(value: Any) -> bool:
    """Whether a value is a module of torch."""
    return _is_of_package(type(value), "torch.nn", "Module")


def _is_tensor_or_module(value: Any) -> bool:
    return _is_tensor(value) or _is_module(value)


def _is_value(value: Any) -> bool:
    """Whether a value is a number, a text or a tensor, and no other object."""
    return _is_plain(value) or _is_tensor(value)


def _is_of_package(kind: type, package: str, base_name: str) -> bool:
    """Whether a class is derived from a class of a package, without importing the package.

    kind: the class of a value; isinstance() would run code of the value.
    """
    # No class is derived from one of no classes.
    base: Any = getattr(sys.modules.get(package), base_name, ())
    return issubclass(kind, base)


def _list_module_items(module: Any) -> list[tuple[str, Any]]:
    """Return the parameters, buffers and submodules of a module that no other module registers."""
    items: list[tuple[str, Any]] = []
    for group in ("_parameters", "_buffers", "_modules"):
        registered = vars(module).get(group) or {}
        items += registered.items()

    return items


def _list_items(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a container with their keys, without methods that a subclass may override."""
    kind = type(value)
    base: Any = next(base for base in _CONTAINERS if issubclass(kind, base))
    if base is dict:
        return _list_entries(value)
    # Tensors of a set have no order, so all of them have one name.
    if base in _SETS:
        return [("{}", item) for item in base.__iter__(value)]

    return [(str(number), item) for number, item in enumerate(base.__iter__(value))]


def _list_entries(value: dict[Any, Any]) -> list[tuple[str, Any]]:
    """Return the values of a dictionary with the texts of their keys."""
    entries: list[tuple[str, Any]] = []
    for number, (key, item) in enumerate(dict.items(value)):
        # The text of an object may contain its address.
        name = str(key) if type(key) in _PLAIN else f"({number})"
        entries.append((name, item))

    return entries


def _is_plain_container(value: Any) -> bool:
    """Whether the items and keys of a container are numbers and texts."""
    if isinstance(value, dict) and not all(type(key) in _PLAIN for key in dict.keys(value)):
        return False

    return all(_is_plain(item) for _, item in _list_items(value))


def _format_container(value: Any) -> str:
    """Return plain items in an order that does not depend on the process."""
    items = _list_items(value)
    if isinstance(value, dict):
        entries = [f"{key}: {_make_plain(item)!r}" for key, item in items if not is_own_name(key)]
        return ", ".join(sorted(entries))

    texts = [repr(_make_plain(item)) for _, item in items]
    if isinstance(value, _SETS):
        texts.sort()

    return ", ".join(texts)


def _make_plain(value: Any) -> Any:
    """Return a number as it is, and a text or bytes in bounded length."""
    kind = type(value)
    if kind in _NUMBERS:
        return value

    for base, make_plain in _PLAIN_FORMS:
        if issubclass(kind, base):
            return make_plain(value)

    return repr(value)


def _name_member(member: enum.Enum) -> str:
    """Return the name of a member of an enumeration, with its class."""
    return _shorten(f"{type(member).__name__}.{member._name_}")


def _mask_device(text: str) -> str:
    """Return a text in bounded length, without the number of a device."""
    return _shorten(_DEVICE.sub(r"\1", str.__str__(text)))


def _format_bytes(data: bytes | bytearray) -> str:
    """Return bytes as a text in bounded length."""
    return _shorten(bytes(data).hex())


def _copy_number(base: type[int | float | complex], number: Any) -> Any:
    """Return an instance of a subclass as a plain number, without methods of its class."""
    return base(base.__repr__(number))


# How to format a value, by its class; the first match counts, because a member of an enumeration may be a number, too.
_PLAIN_FORMS: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (enum.Enum, _name_member),
    (str, _mask_device),
    ((bytes, bytearray), _format_bytes),
    (int, partial(_copy_number, int)),
    (float, partial(_copy_number, float)),
    (complex, partial(_copy_number, complex)),
)


def _shorten(text: str) -> str:
    """Return a long text as its beginning and a digest, so that texts stay different."""
    if len(text) <= _MOST_TEXT:
        return text

    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=4).hexdigest()
    return f"{text[: _MOST_TEXT // 2]}... #{digest}"


def _format_tensor(tensor: MemoryTensor) -> str:
    """Return the dtype and shape of a tensor."""
    dtype = tensor.dtype.name if tensor.dtype else "tensor"
    return f"{dtype} {list(tensor.shape)}"
