"""Stand-ins for the objects in a checkpoint's pickle, and the location of the bytes of its tensors in the file.

Functions are replaced by immutable instances, because the BUILD opcode can set attributes of any object: defaults that
one file set on a function would affect the next file.
"""

from __future__ import annotations

import pickle
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

from syncheck.frozen import record
from syncheck.messages import Refusal
from syncheck.readers.pickles.limits import check_nesting, require
from syncheck.snapshots import MOST_DIMENSIONS, are_naturals
from syncheck.tensors.dtypes import DTYPES, DType
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.messages import Message
    from syncheck.snapshots import Sharding


class _Immutable:
    """An object that cannot change after construction, although BUILD can try to set its attributes."""

    __slots__ = ()

    def __repr__(self) -> str:
        # Without an address, which differs between ranks.
        return f"<{type(self).__name__}>"

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"the pickle sets attributes of a {type(self).__name__}")

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


class _Distinct(_Immutable):
    """An object that equals itself only, so that it can be a key of a pickled dictionary, whatever it contains."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


@record
class Storage(_Immutable):
    """A storage, which may be a view of its record."""

    dtype: DType | None
    """None if untyped."""
    key: str
    """The key of its record."""
    numel: int
    """Number of elements in the record."""
    itemsize: int | None
    """Bytes per element, None for an unknown storage class."""
    start: int
    """The first element of a view of the record."""
    size: int
    """Number of elements in the view."""
    quantized: str = ""
    """The dtype of quantized numbers, for example qint8."""

    def as_tensor(self) -> TensorLocation:
        """Return a tensor of all elements, or of all bytes for an untyped storage."""
        if self.itemsize is None:
            return refused_tensor(Refusal.UNKNOWN_STORAGE())
        if self.dtype is not None:
            return TensorLocation(self, self.dtype, self.start, (self.size,), (1,))

        start = self.start * self.itemsize
        size = self.size * self.itemsize
        return TensorLocation(self, DTYPES["uint8"], start, (size,), (1,))


@record
class TensorLocation(_Distinct):
    """The location of a tensor's bytes within a storage."""

    storage: Storage | None
    dtype: DType | None
    offset: int
    """In elements of `dtype`, as the strides."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: str = ""
    refused: Message | None = None
    """Why the tensor cannot be compared; then only dtype and shape are valid."""
    data: bytes | None = None
    """The bytes of a numpy array, which are in the pickle."""
    big_endian: bool = False
    """For a numpy array."""
    sharding: Sharding | None = None
    """For the local tensor of a DTensor."""

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


@record
class Compound(TensorLocation):
    """A tensor that contains more than its bytes."""

    inner: dict[Any, Any] = field(default_factory=dict)
    """Further content that torch.load restores, like attributes, or the components of a tensor that syncheck does not
    read."""
    hidden: tuple[Any, ...] = ()
    """Objects that this tensor replaces and that are not compared separately."""

    @classmethod
    def wrap(cls, location: TensorLocation, inner: Any, *hidden: Any) -> Compound:
        """Return a tensor with additional content. inner: the state of an object, or components by name."""
        all_inner: dict[Any, Any] = {}
        if isinstance(location, Compound):
            all_inner |= location.inner
        all_inner |= attributes_of(inner)
        return cls(**_fields(location), inner=all_inner, hidden=(location, *hidden))

    def in_parts(self) -> Compound:
        """Return the tensor as one whose parts contain everything that determines its values."""
        refused = Refusal.IN_PARTS(refusal=self.refused)
        return Compound(**(_fields(self) | {"refused": refused}), inner=self.inner, hidden=self.hidden)


def attributes_of(state: Any) -> dict[Any, Any]:
    """Return the attributes in an object's state: a dictionary, or a pair with the dictionary of its slots."""
    if isinstance(state, dict):
        return dict(state)
    if not _is_state_with_slots(state):
        return {"state": state} if state else {}

    attributes: dict[Any, Any] = {}
    for part in state:
        if part is not None:
            attributes |= part
    return attributes


def _is_state_with_slots(state: Any) -> bool:
    """Whether the state of an object is a pair of dictionaries, each of which may be None."""
    if not isinstance(state, tuple) or len(state) != 2:
        return False
    return all(isinstance(part, (dict, type(None))) for part in state)


@record
class StandIn(_Distinct):
    """A callable for a name in a pickle."""

    call: Callable[..., Any]
    rebuilt: list[TensorLocation] | None = None
    """Collects all rebuilt tensors, so that none is lost."""
    name: str = ""
    """The name in the pickle."""

    def __call__(self, *args: Any) -> Any:
        """Rebuild what the pickle asks for."""
        check_nesting(*args)
        result = self.call(*args)
        if self.rebuilt is not None and isinstance(result, TensorLocation):
            self.rebuilt.append(result)
        return result


@record
class StorageType(_Distinct):
    """A storage class like torch.FloatStorage, as named by the persistent id of a storage."""

    dtype: DType | None
    """None for bytes and quantized elements."""
    itemsize: int = 1
    """Bytes per element."""
    quantized: str = ""
    """The dtype of quantized numbers."""

    @property
    def name(self) -> str:
        """A name that distinguishes the class from other storage classes."""
        dtype_name = self.quantized if self.dtype is None else self.dtype.name
        return f"torch storage of {dtype_name or 'bytes'}"


@record
class TypeName(_Distinct):
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

    shape, dtype: if known.
    inner: its components; tensors among them are compared.
    """
    if not isinstance(dtype, DType):
        dtype = None
    location = TensorLocation(None, dtype, 0, check_sizes(shape), (), refused=reason)
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
    if issubclass(kind, Inert):
        return str(getattr(kind, "name", ""))
    # Other stand-ins and plain values have no name of their own.
    return kind.__name__


class Ordered(dict[Any, Any]):
    """Stand in for OrderedDict, whose BUILD could overwrite methods like `items`; torch stores `_metadata` there.

    attributes: states set by BUILD; tensors in them are compared.
    """

    __slots__ = ("attributes",)
    attributes: Any

    def __init__(self, *pairs: Any) -> None:
        # torch passes none.
        if pairs:
            super().__init__(_check_pairs(pairs[0]))

    def __setstate__(self, state: Any) -> None:
        """Keep attributes separate from the items."""
        check_nesting(state)
        self.attributes = [*getattr(self, "attributes", ()), state]


def _check_elements(elements: Any) -> Any:
    """Return the elements for a set after checking their nesting."""
    _require_container(elements)
    check_nesting(*elements)
    return elements


def _check_pairs(pairs: Any) -> Any:
    """Return the pairs of keys and values for a dictionary after checking the nesting of the keys."""
    _require_container(pairs)
    for pair in pairs:
        key = pair
        if isinstance(pair, (list, tuple)) and pair:
            key = pair[0]
        check_nesting(key)
    return pairs


def _require_container(value: Any) -> None:
    require(isinstance(value, (list, tuple, dict, set, frozenset)), "a container with invalid content")


def make_set(elements: Any = ()) -> set[Any]:
    """Stand in for set."""
    return set(_check_elements(elements))


class Frozen(frozenset[Any]):
    """A frozenset with unpredictable hashes, so that a file cannot contain many with equal hashes."""

    __slots__ = ()

    def __hash__(self) -> int:
        # Hashes of strings are randomized, those of numbers are not.
        return hash(frozenset(repr(part) if isinstance(part, (int, float)) else part for part in self))


def make_frozenset(elements: Any = ()) -> frozenset[Any]:
    """Stand in for frozenset."""
    return Frozen(_check_elements(elements))


class Complex(complex):
    """A complex number with an unpredictable hash, so that a file cannot contain many with equal hashes."""

    __slots__ = ()

    def __hash__(self) -> int:
        # Hashes of strings are randomized; + 0 makes -0.0 equal to 0.0.
        return hash(repr(self + 0))
