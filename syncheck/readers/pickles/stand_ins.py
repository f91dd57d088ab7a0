"""Stand-ins for the objects in a checkpoint's pickle, and the location of the bytes of its tensors in the file.

Functions are replaced by immutable instances, because the BUILD opcode can set attributes of any object: defaults that
one file set on a function would affect the next file.
"""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.messages import Refusal
from syncheck.readers.pickles.limits import check_nesting
from syncheck.snapshots import MOST_DIMENSIONS, MOST_ELEMENTS, Tensor, are_naturals, contiguous_strides
from syncheck.tensors.dtypes import DTYPES, DType
from syncheck.text import brief

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from syncheck.messages import Message
    from syncheck.snapshots import Sharding

_AGAIN = "the file is cut short or damaged: save or copy the file again"
# Limit for the bytes of an expanded or overlapping view beyond its stored bytes, minutes of reading: a 1 kB file can
# claim any number.
_MOST_SHOWN = 1 << 36


class _Immutable:
    """An object that cannot change after construction, although BUILD can try to set its attributes.

    Subclasses have no slots, because frozen dataclasses with slots have a `__setstate__` that sets fields.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # without an address, which differs between ranks

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"the pickle sets attributes of a {type(self).__name__}")

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, repr=False)
class Storage(_Immutable):
    """A storage: the key of its record, dtype (None if untyped), and number of elements in the record.

    itemsize: bytes per element, None for an unknown storage class. start, size: the elements of this storage if it is a
    view of the record. quantized: the dtype of quantized numbers, such as qint8.
    """

    dtype: DType | None
    key: str
    numel: int
    itemsize: int | None
    start: int
    size: int
    quantized: str = ""

    def as_tensor(self) -> TensorLocation:
        """Return a tensor of all elements, or of all bytes for an untyped storage."""
        if self.itemsize is None:
            return refused_tensor(Refusal.UNKNOWN_STORAGE())
        unit = 1 if self.dtype else self.itemsize
        return TensorLocation(self, self.dtype or DTYPES["uint8"], self.start * unit, (self.size * unit,), (1,))


@dataclass(frozen=True, repr=False, eq=False)
class TensorLocation(_Immutable):
    """The location of a tensor's bytes: `offset` and `strides` in elements of `dtype` within `storage`.

    refused: why the tensor cannot be compared; then only dtype and shape are valid. data, big_endian: for a numpy
    array, whose bytes are in the pickle. sharding: for the local tensor of a DTensor.
    """

    storage: Storage | None
    dtype: DType | None
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: str = ""
    refused: Message | None = None
    data: bytes | None = None
    big_endian: bool = False
    sharding: Sharding | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor, if this is the local tensor of a DTensor."""
        return self.shape if self.sharding is None else self.sharding.shape

    def as_shard(self, sharding: Sharding) -> TensorLocation:
        """Return the same location as a rank's shard of a DTensor."""
        return TensorLocation(**(_fields(self) | {"sharding": sharding}))

    def without_attributes(self) -> TensorLocation:
        """Return the same location without further content."""
        return TensorLocation(**_fields(self))


def _fields(location: TensorLocation) -> dict[str, Any]:
    return {field.name: getattr(location, field.name) for field in fields(TensorLocation)}


@dataclass(frozen=True, repr=False, eq=False)
class Compound(TensorLocation):
    """A tensor that contains more than its bytes.

    inner: further content that torch.load restores, like attributes, or the components of a tensor that syncheck
    does not read. hidden: objects that this tensor replaces and that are not compared separately.
    """

    inner: dict[Any, Any] = field(default_factory=dict)
    hidden: tuple[Any, ...] = ()

    @classmethod
    def wrap(cls, location: TensorLocation, inner: Any, *hidden: Any) -> Compound:
        """Return a tensor with additional content. inner: the state of an object, or components by name."""
        before = location.inner if isinstance(location, Compound) else {}
        return cls(**_fields(location), inner={**before, **attributes_of(inner)}, hidden=(location, *hidden))

    def in_parts(self) -> Compound:
        """Return the tensor as one whose parts contain everything that determines its values."""
        refused = Refusal.IN_PARTS(refusal=self.refused)
        return Compound(**(_fields(self) | {"refused": refused}), inner=self.inner, hidden=self.hidden)


def attributes_of(state: Any) -> dict[Any, Any]:
    """Return the attributes in an object's state: a dictionary, or a pair with the dictionary of its slots."""
    if isinstance(state, dict):
        return dict(state)
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, (dict, type(None))) for part in state):
        return {name: value for part in state if part for name, value in part.items()}
    return {"state": state} if state else {}


@dataclass(frozen=True, repr=False, eq=False)
class StandIn(_Immutable):
    """A callable for a name in a pickle."""

    call: Callable[..., Any]
    rebuilt: list[TensorLocation] | None = None
    """Collects all rebuilt tensors, so that none is lost."""
    name: str = ""
    """The name in the pickle."""

    def __call__(self, *args: Any) -> Any:
        """Rebuild what the pickle asks for."""
        check_nesting(*args)
        made = self.call(*args)
        if self.rebuilt is not None and isinstance(made, TensorLocation):
            self.rebuilt.append(made)
        return made


@dataclass(frozen=True, repr=False, eq=False)
class StorageType(_Immutable):
    """A storage class like torch.FloatStorage, as named by the persistent id of a storage.

    dtype: None for bytes and quantized elements. itemsize: bytes per element. quantized: dtype of quantized numbers.
    """

    dtype: DType | None
    itemsize: int = 1
    quantized: str = ""

    @property
    def name(self) -> str:
        """A name that distinguishes the class from other storage classes."""
        dtype_name = self.quantized if self.dtype is None else self.dtype.name
        return f"torch storage of {dtype_name or 'bytes'}"


@dataclass(frozen=True, repr=False, eq=False)
class TypeName(_Immutable):
    """A class that describes a tensor, like torch.Tensor."""

    name: str

    @property
    def full_name(self) -> str:
        """The name with its module."""
        return self.name if "." in self.name else f"torch.{self.name}"


class DTypeName(TypeName):
    """A dtype like torch.float8_e4m3fn, an argument of _rebuild_tensor_v3."""

    @property
    def dtype(self) -> DType | None:
        """The supported dtype, or None."""
        return DTYPES.get(self.name)


def check_sizes(value: Any) -> tuple[int, ...]:
    """Check a tuple of sizes or strides. Raises UnpicklingError for anything but non-negative integers."""
    if not isinstance(value, (tuple, list)) or not are_naturals(value):
        raise pickle.UnpicklingError(f"sizes and strides must be non-negative integers, found {brief(value)}")
    if len(value) > MOST_DIMENSIONS:
        raise pickle.UnpicklingError(f"{len(value)} dimensions; at most {MOST_DIMENSIONS} are read")
    return tuple(value)


def refused_tensor(reason: Message, shape: Any = (), dtype: Any = None, inner: Any = None) -> TensorLocation:
    """Return a tensor that is counted but not read.

    shape, dtype: if known. inner: its components; tensors among them are compared.
    """
    location = TensorLocation(
        None, dtype if isinstance(dtype, DType) else None, 0, check_sizes(shape), (), refused=reason
    )
    return Compound.wrap(location, inner) if inner else location


def tensor_in_parts(reason: Message, parts: dict[str, Any], shape: Any = (), dtype: Any = None) -> TensorLocation:
    """Return a tensor whose bytes are not read, because its parts contain everything that determines its values.

    reason: such as "a sparse tensor". parts: tensors, numbers and texts by name; each of them is compared.
    """
    return refused_tensor(Refusal.IN_PARTS(refusal=reason), shape, dtype, parts)


class Inert:
    """An object of an unknown class, which only keeps its arguments and state."""

    name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        """Keep the arguments."""
        check_nesting(*args, *kwargs.values())
        self = super().__new__(cls)
        self.arguments = [*args, *kwargs.values()]
        self.items = {}
        return self

    arguments: list[Any]
    items: dict[Any, Any]
    interpretation: Any = None
    """A cache for a reader's interpretation of the object."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept any arguments."""

    def __setstate__(self, state: Any) -> None:
        check_nesting(state)
        self.arguments.append(state)

    def append(self, item: Any) -> None:
        """Stand in for list.append (opcode APPEND)."""
        self.arguments.append(item)

    def extend(self, items: Any) -> None:
        """Stand in for list.extend (opcode APPENDS)."""
        self.arguments.extend(items)

    def add(self, item: Any) -> None:
        """Stand in for set.add (opcode ADDITEMS)."""
        self.arguments.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def __call__(self, *args: Any) -> Inert:
        """Stand in for a call that rebuilds another object."""
        check_nesting(*args)
        self.arguments.extend(args)
        return self

    def __repr__(self) -> str:
        return f"<{self.name}>"


def name_class(value: Any) -> str:
    """Return the full name of a class that a pickle names, or of the class of an object."""
    if isinstance(value, TensorLocation):
        return "torch.Tensor"
    kind = value if isinstance(value, type) else type(value)
    # Other stand-ins and plain values have no name of their own.
    return str(getattr(kind, "name", "")) if issubclass(kind, Inert) else kind.__name__


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


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of a storage in a file.

    label: for errors. crc32: 0 if unknown. data: the bytes, if the file contains them in another encoding.
    """

    label: str
    start: int
    size: int
    crc32: int = 0
    data: bytes | None = None


def locate_tensor(
    name: str,
    location: TensorLocation,
    path: str,
    record_of: Callable[[Storage], Record],
    opened: os.stat_result,
    *,
    big_endian: bool = False,
) -> Tensor:
    """Check that a tensor is within the record of its storage, and return it with its offset in the file."""
    dtype, shape = location.dtype, location.shape
    if location.refused or dtype is None or (location.storage is None and location.data is None):
        refused = location.refused or Refusal.STORAGE_WITHOUT_DTYPE()
        # Every tensor has one stride per dimension, also without readable elements.
        strides = contiguous_strides(shape)
        return Tensor(name, dtype.name if dtype else "unknown", shape, strides, path, 0, refused=refused)
    if location.storage is None:
        return Tensor(
            name, dtype.name, shape, location.strides, path, 0, location.big_endian, data=location.data,
            sharding=location.sharding,
        )  # fmt: skip
    record = record_of(location.storage)
    if len(shape) == 1:  # a shortcut for the most frequent shape
        elements, last = shape[0], (shape[0] - 1) * location.strides[0]
    else:
        elements = math.prod(shape)
        last = sum((n - 1) * stride for n, stride in zip(shape, location.strides, strict=True))
    whole = not location.offset and last + 1 == elements == record.size / dtype.size
    end = 0 if 0 in shape else (location.offset + last + 1) * dtype.size
    if end > record.size:
        found = f"tensor '{name}' ends at byte {end} of a record of {record.size}"
        needed = f"{end} bytes for {dtype.name} {list(shape)}"
        raise MalformedFile(path, place=record.label, found=found, needed=needed, next_step=_AGAIN)
    itemsize = location.storage.itemsize or dtype.size
    stored = location.storage.numel * itemsize
    # Storages that are shared between dtypes may have a remainder.
    if not 0 <= record.size - stored < itemsize:
        found = f"a storage of {location.storage.numel} elements, {stored} bytes, in a record of {record.size}"
        needed = "equal sizes, up to a partial element"
        raise MalformedFile(path, place=record.label, found=found, needed=needed, next_step=_AGAIN)
    if (shown := elements * dtype.size) > MOST_ELEMENTS:
        raise MalformedFile(
            path, place=record.label, found=f"tensor '{name}' of sizes {brief(shape)} has more than 2**63 bytes",
            needed="fewer", next_step="no library writes this; check the origin of the file",
        )  # fmt: skip
    if shown > max(record.size, _MOST_SHOWN):
        refused = Refusal.HUGE_VIEW(stored=record.size, shown=shown)
        return Tensor(name, dtype.name, shape, location.strides, path, 0, refused=refused)
    if record.data is not None:
        return Tensor(
            name, dtype.name, shape, location.strides, path, location.offset * dtype.size, big_endian, location.lazy,
            data=record.data,
        )  # fmt: skip
    return Tensor(
        name, dtype.name, shape, location.strides, path, record.start + location.offset * dtype.size,
        big_endian, location.lazy, opened=opened, crc32=(record.crc32 if whole else 0) or None,
        record=(record.crc32, record.start, record.size) if record.crc32 else None, sharding=location.sharding,
    )  # fmt: skip
