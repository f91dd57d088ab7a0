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
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.live.digest import digest_all
from syncheck.live.memory.objects import get_referents
from syncheck.live.memory.origins import is_unread_class, list_internal_names, list_packages, reads_only_values
from syncheck.live.memory.tensor_bytes import describe_tensor
from syncheck.value_kinds import METRIC, is_own_name

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

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
_PLAIN_BASES = (*_PLAIN, enum.Enum)
_LISTS = (list, tuple, deque)
_SETS = (set, frozenset)
# The number of a device is that of the rank.
_DEVICE = re.compile(r"(cuda|xpu|hpu|npu|mps|cpu):\d+")


class Part(NamedTuple):
    """A value to read. name: its path in the model. depth: number of containers around it."""

    name: str
    value: Any
    depth: int


@dataclass
class Attributes:
    """The plain attributes of the modules of one rank.

    values: by path. unread: paths with their classes. trained: parameters that the optimizer updates, by path.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    trained: dict[str, Any] = field(default_factory=dict)


class AttributeReader:
    """Reads the attributes of modules.

    known: ids of the objects that are compared anyway, such as parameters. optimized: ids of the parameters of the
    optimizers.
    """

    def __init__(self, known: Container[int], optimized: Container[int]) -> None:
        self._known = known
        self._optimized = optimized
        self._seen: dict[int, Any] = {}  # with the objects, because ids are unique only among live objects
        self._tensors: list[tuple[str, MemoryTensor]] = []
        self._parts = 0
        self.attributes = Attributes()

    def read_module(self, path: str, module: Any) -> None:
        """Read the attributes of a module. path: of the module, empty for a root."""
        prefix, internal = f"{path}." if path else "", list_internal_names()
        metric_states, is_layer = _list_metric_states(module), reads_only_values(module)
        for name, value in vars(module).items():
            if name in internal or name.startswith("__") or is_own_name(name):
                continue
            if metric_states is None:
                if not is_layer or _is_plain(value) or _is_tensor(value):
                    self._walk(Part(f"{prefix}{name}", value, 0))
            elif name in metric_states:  # other attributes of a metric are its counters and caches
                self._walk(Part(f"{METRIC}{prefix}{name}", value, 0))

    def finish(self) -> Attributes:
        """Return the attributes, after the digests of all tensors have been computed."""
        self._describe_tensors()
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
            pending += reversed(self._read(part))

    def _read(self, part: Part) -> list[Part]:
        """Read one value; return the parts in it."""
        name, value, _ = part
        if _is_plain(value):
            self.attributes.values[name] = _make_plain(value)
        elif id(value) in self._known:
            return []
        elif _is_tensor(value):
            self._add_tensor(name, value)
        elif id(value) not in self._seen:
            return self._open(part)
        return []

    def _open(self, part: Part) -> list[Part]:
        """Return the parts of a container, module or object."""
        name, value, depth = part
        kind = type(value)
        if issubclass(kind, (dict, *_LISTS, *_SETS)):
            items = self._read_container(part)
        elif _is_module(value):
            items = _list_module_items(value)
        elif issubclass(kind, (type, ModuleType)) or is_unread_class(kind):
            items = []
        else:
            items = list(read_fields(value).items())
            if not items:
                self._search(part)
        return [Part(f"{name}.{key}", item, depth + 1) for key, item in items if not is_own_name(key)]

    def _read_container(self, part: Part) -> list[tuple[str, Any]]:
        """Read a container of plain values as one value; return the items of another container."""
        name, value, _ = part
        fields = list(read_fields(value).items())
        if len(value) <= _MOST_PLAIN and not fields and _is_plain_container(value):
            self.attributes.values[name] = _shorten(f"{type(value).__name__} {_format_container(value)}")
            return []
        self._seen[id(value)] = value
        if len(value) > _MOST_ITEMS:
            self._list_unread(part)
            return []
        return [*_list_items(value), *fields]

    def _search(self, part: Part) -> None:
        """List a value without attributes if a tensor is behind it, or if its class is unknown."""
        is_python = type(part.value).__module__ in ("builtins", "functools", "weakref", "collections")
        if not is_python or self._hides_tensor(part.value):
            self._list_unread(part)
        self._seen[id(part.value)] = part.value

    def _hides_tensor(self, value: Any) -> bool:
        """Whether a function, an iterator or the like refers to a tensor or module that is not compared."""
        pending: list[Any] = [value]
        seen: set[int] = set()
        while pending:
            node = pending.pop()
            is_known = id(node) in self._known or id(node) in self._seen or id(node) in seen
            if is_known or issubclass(type(node), (type, ModuleType)):
                continue
            if _is_tensor(node) or _is_module(node) or len(seen) > _MOST_SEARCHED:
                return True
            seen.add(id(node))
            pending += get_referents(node)
        return False

    def _add_tensor(self, name: str, value: Any) -> None:
        """Add a tensor; a parameter that the optimizer trains belongs to the model, wherever it is held."""
        if id(value) in self._optimized:
            self.attributes.trained[name] = value
            return
        tensor = describe_tensor(value)
        if tensor.content is None or tensor.sharding is not None:
            # Shards differ by design, and other tensors are refused with a reason.
            self.attributes.values[name] = _format_tensor(tensor, "")
            if tensor.refused:
                self.attributes.unread.append(f"{name} ({tensor.refused})")
            return
        self._tensors.append((name, tensor))

    def _describe_tensors(self) -> None:
        """Add the digests of tensors, up to the limit of bytes."""
        room, hashed = _MOST_BYTES, []
        for name, tensor in self._tensors:
            source: Any = getattr(tensor.content, "source", None)
            room -= source.nbytes
            if room < 0:
                self.attributes.unread.append(f"{name} (a tensor of {source.nbytes} bytes)")
                continue
            hashed.append((name, tensor, source))
        digests = digest_all([source for _, _, source in hashed])
        in_sets: dict[str, list[str]] = {}
        for (name, tensor, _), (_, digest) in zip(hashed, digests, strict=True):
            in_sets.setdefault(name, []).append(_format_tensor(tensor, digest.hex()[:8]))
        for name, texts in in_sets.items():
            self.attributes.values[name] = _shorten(", ".join(sorted(texts)))

    def _list_unread(self, part: Part) -> None:
        kind = type(part.value)
        self.attributes.unread.append(f"{part.name} ({kind.__module__}.{kind.__qualname__})"[:_MOST_TEXT])


def read_fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object from its `__dict__` and slots, without properties and special names."""
    if type(value) in (FunctionType, dict, *_LISTS, *_SETS):
        return {}
    fields: dict[str, Any] = {}
    kind: Any = type(value)
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
            if type(descriptor) is MemberDescriptorType and not name.startswith("__"):
                slots.setdefault(name, descriptor)
    return slots


def describe_modes(modules: Mapping[str, Any]) -> str:
    """Return which modules are in training mode: 'on', 'off', or the modules in which it is off. modules: by path."""
    off = [path or "(root)" for path, module in modules.items() if vars(module).get("training") is False]
    if not off:
        return "on"
    return "off" if len(off) == len(modules) else _shorten(f"off in {', '.join(off)}")


def _list_metric_states(module: Any) -> Container[str] | None:
    """Return the names of the states of a metric of torchmetrics; None for other modules."""
    kind: Any = type(module)
    states = vars(module).get("_defaults")
    return states if isinstance(states, dict) and "torchmetrics" in list_packages(kind) else None


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, None or a member of an enumeration, without running its code."""
    kind = type(value)
    if value is None or kind in _PLAIN or issubclass(kind, _PLAIN_BASES):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic)


def _is_tensor(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    kinds = tuple(kind for kind in (getattr(torch, "Tensor", None), getattr(numpy, "ndarray", None)) if kind)
    return issubclass(type(value), kinds)


def _is_module(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and issubclass(type(value), torch.nn.Module)


def _list_module_items(module: Any) -> list[tuple[str, Any]]:
    """Return the parameters, buffers and submodules of a module that no other module registers."""
    items: list[tuple[str, Any]] = []
    for group in ("_parameters", "_buffers", "_modules"):
        items += (vars(module).get(group) or {}).items()
    return items


def _list_items(value: Any) -> Iterable[tuple[str, Any]]:
    """Return the items of a container with their keys, without methods that a subclass may override."""
    if isinstance(value, dict):
        items = []
        for number, (key, item) in enumerate(dict.items(value)):
            items.append((str(key) if type(key) in _PLAIN else f"({number})", item))
        return items
    if isinstance(value, _SETS):
        # Tensors of a set have no order, so all of them have one name.
        base: Any = frozenset if isinstance(value, frozenset) else set
        return [("{}", item) for item in base.__iter__(value)]
    kind: Any = next(kind for kind in _LISTS if isinstance(value, kind))
    return [(str(number), item) for number, item in enumerate(kind.__iter__(value))]


def _is_plain_container(value: Any) -> bool:
    if isinstance(value, dict) and not all(type(key) in _PLAIN for key in dict.keys(value)):
        return False
    return all(_is_plain(item) for _, item in _list_items(value))


def _format_container(value: Any) -> str:
    """Return plain items in an order that does not depend on the process."""
    texts = []
    for key, item in _list_items(value):
        if isinstance(value, dict) and not is_own_name(key):
            texts.append(f"{key}: {_make_plain(item)!r}")
        elif not isinstance(value, dict):
            texts.append(repr(_make_plain(item)))
    return ", ".join(sorted(texts) if isinstance(value, (dict, *_SETS)) else texts)


def _make_plain(value: Any) -> Any:
    """Return a number as it is, and a text or bytes in bounded length."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return _shorten(f"{kind.__name__}.{value._name_}")
    if issubclass(kind, str):
        return _shorten(_DEVICE.sub(r"\1", str.__str__(value)))
    if issubclass(kind, (bytes, bytearray)):
        return _shorten(bytes(value).hex())
    if kind in _NUMBERS:
        return value
    exact = next((base for base in _NUMBERS if issubclass(kind, base)), None)
    if exact is not None:
        return exact(exact.__repr__(value))
    return "None" if value is None else repr(value)


def _shorten(text: str) -> str:
    """Return a long text as its beginning and a digest, so that texts stay different."""
    if len(text) <= _MOST_TEXT:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=4).hexdigest()
    return f"{text[: _MOST_TEXT // 2]}... #{digest}"


def _format_tensor(tensor: MemoryTensor, digest: str) -> str:
    dtype = tensor.dtype.name if tensor.dtype else "tensor"
    return f"{dtype} {list(tensor.shape)}" + (f" #{digest}" if digest else "")
