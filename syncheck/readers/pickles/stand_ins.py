"""What stands in a checkpoint's pickle for storages, tensors, dtypes, and functions that rebuild an object.

Stand-ins are slotted instances without settable attributes, not functions: pickle's BUILD opcode can set attributes
on whatever the stream holds, and a function whose defaults were set by one file would serve the next file too.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, NoReturn

from syncheck.dtypes import DTYPES, DType
from syncheck.errors import brief
from syncheck.readers.pickles.limits import light
from syncheck.snapshots import MOST_DIMENSIONS, are_naturals

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.snapshots import Sharding

_put = object.__setattr__  # past the one of _Frozen


class _Frozen:
    """Once built it stays as it is: BUILD may try to set the attributes of anything that the stream has made."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # an address would be another one on each rank

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle sets attribute {name!r} of a {type(self).__name__}")

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            _put(self, name, value)


class Storage(_Frozen):
    """A storage record of the archive: its key, dtype (None when untyped) and size in elements.

    itemsize: bytes of an element; None for a storage class that is not known. start, size: of the elements that this
    one is, where it is a part of the record.
    """

    __slots__ = ("dtype", "itemsize", "key", "numel", "size", "start")
    dtype: DType | None
    itemsize: int | None
    key: str
    numel: int
    start: int
    size: int

    def __init__(
        self, dtype: DType | None, key: str, numel: int, itemsize: int | None = None, start: int = 0,
        size: int | None = None,
    ) -> None:  # fmt: skip
        _put(self, "dtype", dtype)  # one by one, which is faster, and there is one of a tensor
        _put(self, "key", key)
        _put(self, "numel", numel)
        _put(self, "itemsize", itemsize)
        _put(self, "start", start)
        _put(self, "size", numel if size is None else size)

    def same(self, other: Storage) -> bool:
        """Whether two are the same elements of one record."""
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def as_tensor(self) -> TensorPlace:
        """Return the place of all its elements, of all its bytes where it is untyped."""
        if self.itemsize is None:
            return refused_place("a storage of a class that is not known")
        unit = 1 if self.dtype else self.itemsize
        return TensorPlace(self, self.dtype or DTYPES["uint8"], self.start * unit, (self.size * unit,), (1,))


class TensorPlace(_Frozen):
    """Where a tensor's bytes lie: `offset` and `strides` in elements of `dtype` within `storage`.

    refused: why its bytes cannot be compared; then only dtype and shape mean something. data, big_endian: of a numpy
    array, whose bytes the pickle holds itself. sharding: of the local tensor of a DTensor.
    """

    __slots__ = ("big_endian", "data", "dtype", "lazy", "offset", "refused", "shape", "sharding", "storage", "strides")
    storage: Storage | None
    dtype: DType | None
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: str
    refused: str
    data: bytes | None
    big_endian: bool
    sharding: Sharding | None

    def __init__(
        self,
        storage: Storage | None,
        dtype: DType | None,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        lazy: str = "",
        refused: str = "",
    ) -> None:
        _put(self, "storage", storage)
        _put(self, "dtype", dtype)
        _put(self, "offset", offset)
        _put(self, "shape", shape)
        _put(self, "strides", strides)
        _put(self, "lazy", lazy)
        _put(self, "refused", refused)
        _put(self, "data", None)
        _put(self, "big_endian", False)
        _put(self, "sharding", None)

    def as_part(self, sharding: Sharding) -> TensorPlace:
        """Return the same place, as a rank's part of a DTensor."""
        part = TensorPlace(self.storage, self.dtype, self.offset, self.shape, self.strides, self.lazy, self.refused)
        part._fill(data=self.data, big_endian=self.big_endian, sharding=sharding)
        return part


class Compound(TensorPlace):
    """A tensor with more in it than bytes.

    inner: what torch.load restores beside the bytes, such as attributes, or what a tensor that is not read is made of.
    hidden: what this place stands for, and what is not compared by itself.
    """

    __slots__ = ("hidden", "inner")
    inner: dict[Any, Any]
    hidden: tuple[Any, ...]

    @classmethod
    def around(cls, place: TensorPlace, inner: Any, *hidden: Any) -> Compound:
        """Return the same place with something beside it. inner: the state of an object, or other parts by name."""
        made = cls(place.storage, place.dtype, place.offset, place.shape, place.strides, place.lazy, place.refused)
        before = place.inner if isinstance(place, Compound) else {}
        made._fill(data=place.data, big_endian=place.big_endian, sharding=place.sharding)
        made._fill(inner={**before, **attributes_of(inner)}, hidden=(place, *hidden))
        return made


def attributes_of(state: Any) -> dict[Any, Any]:
    """Return the attributes of an object's state: a dictionary, or one beside a dictionary of its slots."""
    if isinstance(state, dict):
        return dict(state)
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, (dict, type(None))) for part in state):
        return {name: value for part in state if part for name, value in part.items()}
    return {"state": state} if state else {}


class StandIn(_Frozen):
    """A callable of ours that a pickle may name."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        _put(self, "_call", call)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"the pickle sets attribute {name!r} of a rebuild function")

    def __call__(self, *args: Any) -> Any:
        """Rebuild what the pickle asks for."""
        light(*args)
        return self._call(*args)


class Counted(StandIn):
    """A stand-in that lists each tensor it rebuilds, so that none is lost."""

    __slots__ = ("_made",)
    _made: list[TensorPlace]

    def __init__(self, other: StandIn, made: list[TensorPlace]) -> None:
        super().__init__(other._call)  # noqa: SLF001 - of its own class
        _put(self, "_made", made)

    def __call__(self, *args: Any) -> Any:
        """Rebuild what the pickle asks for."""
        light(*args)
        made = self._call(*args)
        if isinstance(made, TensorPlace):
            self._made.append(made)
        return made


class StorageType(StandIn):
    """A storage class such as torch.FloatStorage, as the persistent id of a storage names it.

    dtype: None for bytes, and for elements of a quantized tensor. itemsize: bytes of an element.
    """

    __slots__ = ("dtype", "itemsize")
    dtype: DType | None
    itemsize: int

    def __init__(self, dtype: DType | None, itemsize: int = 1) -> None:
        super().__init__(_not_callable)
        _put(self, "dtype", dtype)
        _put(self, "itemsize", dtype.size if dtype is not None else itemsize)


def _not_callable(*_: Any) -> NoReturn:
    raise pickle.UnpicklingError("a type or dtype is called")


class TypeName(StandIn):
    """A class that a pickle names to say what a tensor is, such as torch.Tensor."""

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        super().__init__(_not_callable)
        _put(self, "name", name)


class DTypeName(TypeName):
    """A dtype such as torch.float8_e4m3fn, given by name to _rebuild_tensor_v3; None for one that is not read."""

    __slots__ = ("dtype",)
    dtype: DType | None

    def __init__(self, name: str) -> None:
        super().__init__(name)
        _put(self, "dtype", DTYPES.get(name))


def sizes(value: Any) -> tuple[int, ...]:
    """Check a tuple of sizes or strides. Raises UnpicklingError for anything but non-negative integers."""
    if not isinstance(value, (tuple, list)) or not are_naturals(value):
        raise pickle.UnpicklingError(f"sizes and strides must be non-negative integers, found {brief(value)}")
    if len(value) > MOST_DIMENSIONS:
        raise pickle.UnpicklingError(f"{len(value)} dimensions; at most {MOST_DIMENSIONS} are read")
    return tuple(value)


def refused_place(reason: str, shape: Any = (), dtype: Any = None, inner: Any = None) -> TensorPlace:
    """Stand in for a tensor whose bytes are not read, so that it is counted.

    shape, dtype: if these are known. inner: what it is made of; tensors in it are compared.
    """
    place = TensorPlace(None, dtype if isinstance(dtype, DType) else None, 0, sizes(shape), (), refused=reason)
    return Compound.around(place, inner) if inner else place
