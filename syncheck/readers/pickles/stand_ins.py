"""What stands in a checkpoint's pickle for storages, tensors, dtypes, and functions that rebuild an object.

Stand-ins are frozen instances, not functions: pickle's BUILD opcode can set attributes
on whatever the stream holds, and a function whose defaults were set by one file would serve the next file too.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from syncheck.dtypes import DTYPES, DType
from syncheck.errors import brief
from syncheck.messages import Refusal
from syncheck.readers.pickles.limits import light
from syncheck.snapshots import MOST_DIMENSIONS, are_naturals

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.messages import Message
    from syncheck.snapshots import Sharding


class _Frozen:
    """Once built it stays as it is: BUILD may try to set the attributes of anything that the stream has made.

    The subclasses have no slots: a frozen dataclass with slots gets a `__setstate__` that sets its fields.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"  # an address would be another one on each rank

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError(f"the pickle sets attributes of a {type(self).__name__}")

    def _fill(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, repr=False)
class Storage(_Frozen):
    """A storage record of the archive: its key, dtype (None when untyped) and size in elements.

    itemsize: bytes of an element; None for a storage class that is not known. start, size: of the elements that this
    one is: it may be a part of the record.
    """

    dtype: DType | None
    key: str
    numel: int
    itemsize: int | None
    start: int
    size: int

    def as_tensor(self) -> TensorPlace:
        """Return the place of all its elements, of all its bytes where it is untyped."""
        if self.itemsize is None:
            return refused_place(Refusal.UNKNOWN_STORAGE())
        unit = 1 if self.dtype else self.itemsize
        return TensorPlace(self, self.dtype or DTYPES["uint8"], self.start * unit, (self.size * unit,), (1,))


@dataclass(frozen=True, repr=False, eq=False)
class TensorPlace(_Frozen):
    """Where a tensor's bytes lie: `offset` and `strides` in elements of `dtype` within `storage`.

    refused: why its bytes cannot be compared; then only dtype and shape mean something. data, big_endian: of a numpy
    array, whose bytes the pickle holds itself. sharding: of the local tensor of a DTensor.
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

    def as_part(self, sharding: Sharding) -> TensorPlace:
        """Return the same place, as a rank's part of a DTensor."""
        return TensorPlace(**(_fields(self) | {"sharding": sharding}))


def _fields(place: TensorPlace) -> dict[str, Any]:
    return {field.name: getattr(place, field.name) for field in fields(TensorPlace)}


@dataclass(frozen=True, repr=False, eq=False)
class Compound(TensorPlace):
    """A tensor with more in it than bytes.

    inner: what torch.load restores beside the bytes, such as attributes, or what a tensor that is not read is made of.
    hidden: what this place stands for, and what is not compared by itself.
    """

    inner: dict[Any, Any] = field(default_factory=dict)
    hidden: tuple[Any, ...] = ()

    @classmethod
    def around(cls, place: TensorPlace, inner: Any, *hidden: Any) -> Compound:
        """Return the same place with something beside it. inner: the state of an object, or other parts by name."""
        before = place.inner if isinstance(place, Compound) else {}
        return cls(**_fields(place), inner={**before, **attributes_of(inner)}, hidden=(place, *hidden))


def attributes_of(state: Any) -> dict[Any, Any]:
    """Return the attributes of an object's state: a dictionary, or one beside a dictionary of its slots."""
    if isinstance(state, dict):
        return dict(state)
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, (dict, type(None))) for part in state):
        return {name: value for part in state if part for name, value in part.items()}
    return {"state": state} if state else {}


@dataclass(frozen=True, repr=False, eq=False)
class StandIn(_Frozen):
    """A callable of ours that a pickle may name. made: lists each tensor that it rebuilds, so that none is lost."""

    call: Callable[..., Any]
    made: list[TensorPlace] | None = None

    def __call__(self, *args: Any) -> Any:
        """Rebuild what the pickle asks for."""
        light(*args)
        made = self.call(*args)
        if self.made is not None and isinstance(made, TensorPlace):
            self.made.append(made)
        return made


@dataclass(frozen=True, repr=False, eq=False)
class StorageType(_Frozen):
    """A storage class such as torch.FloatStorage, as the persistent id of a storage names it.

    dtype: None for bytes, and for elements of a quantized tensor. itemsize: bytes of an element.
    """

    dtype: DType | None
    itemsize: int = 1


@dataclass(frozen=True, repr=False, eq=False)
class TypeName(_Frozen):
    """A class that a pickle names to say what a tensor is, such as torch.Tensor."""

    name: str


class DTypeName(TypeName):
    """A dtype such as torch.float8_e4m3fn, given by name to _rebuild_tensor_v3."""

    @property
    def dtype(self) -> DType | None:
        """The row of our table; None for one that is not read."""
        return DTYPES.get(self.name)


def sizes(value: Any) -> tuple[int, ...]:
    """Check a tuple of sizes or strides. Raises UnpicklingError for anything but non-negative integers."""
    if not isinstance(value, (tuple, list)) or not are_naturals(value):
        raise pickle.UnpicklingError(f"sizes and strides must be non-negative integers, found {brief(value)}")
    if len(value) > MOST_DIMENSIONS:
        raise pickle.UnpicklingError(f"{len(value)} dimensions; at most {MOST_DIMENSIONS} are read")
    return tuple(value)


def refused_place(reason: Message, shape: Any = (), dtype: Any = None, inner: Any = None) -> TensorPlace:
    """Stand in for a tensor whose bytes are not read, so that it is counted.

    shape, dtype: if these are known. inner: what it is made of; tensors in it are compared.
    """
    place = TensorPlace(None, dtype if isinstance(dtype, DType) else None, 0, sizes(shape), (), refused=reason)
    return Compound.around(place, inner) if inner else place
