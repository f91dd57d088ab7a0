"""The location of a tensor's bytes in the file, after checking that its storage contains them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.frozen import record
from syncheck.messages import Refusal
from syncheck.snapshots import MOST_ELEMENTS, Tensor, contiguous_strides
from syncheck.text import brief

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from syncheck.messages import Message
    from syncheck.readers.pickles.stand_ins import Storage, TensorLocation
    from syncheck.tensors.dtypes import DType

_AGAIN = "the file is cut short or damaged: save or copy the file again"
# Limit for the bytes of an expanded or overlapping view beyond its stored bytes, minutes of reading: a 1 kB file can
# claim any number.
_MOST_VIEWED = 1 << 36


@record
class Record:
    """The bytes of a storage in a file."""

    label: str
    """For errors."""
    start: int
    size: int
    crc32: int = 0
    """0 if unknown."""
    data: bytes | None = None
    """The bytes, if the file contains them in another encoding."""


def locate_tensor(
    name: str,
    location: TensorLocation,
    path: str,
    record_of: Callable[[Storage], Record],
    opened: os.stat_result,
    *,
    big_endian: bool = False,
) -> Tensor:
    """Check that a tensor is within the record of its storage, and return it with its offset in the file.

    name: of the tensor in the checkpoint.
    record_of: returns the bytes of a storage.
    opened: the status of the file.
    big_endian: whether the file stores the most significant byte of an element first.
    Raises MalformedFile.
    """
    dtype = location.dtype
    is_stored = location.storage is not None or location.data is not None
    if location.refused or dtype is None or not is_stored:
        # Every tensor has one stride per dimension, also without readable elements.
        strides = contiguous_strides(location.shape)
        return _describe_refused(name, location, path, location.refused or Refusal.STORAGE_WITHOUT_DTYPE(), strides)
    if location.storage is None:
        return Tensor(
            name=name,
            dtype=dtype.name,
            shape=location.shape,
            strides=location.strides,
            path=path,
            offset=0,
            big_endian=location.big_endian,
            data=location.data,
            sharding=location.sharding,
        )

    stored = record_of(location.storage)
    extent = _measure(location, dtype)
    _check_record(name, location, dtype, extent, stored, path)
    if extent.size > max(stored.size, _MOST_VIEWED):
        refused = Refusal.HUGE_VIEW(stored=stored.size, shown=extent.size)
        return _describe_refused(name, location, path, refused, location.strides)

    is_in_file = stored.data is None
    return Tensor(
        name=name,
        dtype=dtype.name,
        shape=location.shape,
        strides=location.strides,
        path=path,
        offset=stored.start + extent.start,
        big_endian=big_endian,
        lazy=location.lazy,
        data=stored.data,
        opened=opened if is_in_file else None,
        sharding=location.sharding if is_in_file else None,
        **_list_checksums(stored, extent),
    )


class _Extent(NamedTuple):
    """The bytes of a tensor in the record of its storage."""

    start: int
    end: int
    size: int
    """The size of all elements, which is larger than the distance from start to end if elements overlap."""


def _describe_refused(
    name: str, location: TensorLocation, path: str, reason: Message, strides: tuple[int, ...]
) -> Tensor:
    """Return a tensor that cannot be compared."""
    return Tensor(
        name=name,
        dtype="unknown" if location.dtype is None else location.dtype.name,
        shape=location.shape,
        strides=strides,
        path=path,
        offset=0,
        refused=reason,
    )


def _list_checksums(record: Record, extent: _Extent) -> dict[str, Any]:
    """Return the checksums of a tensor, as fields of `Tensor`."""
    if not record.crc32:
        return {}

    checksums: dict[str, Any] = {"record": (record.crc32, record.start, record.size)}
    # The checksum of a record is the checksum of a tensor only if the tensor has all of its bytes, each once.
    if extent.start == 0 and extent.end == extent.size == record.size:
        checksums["crc32"] = record.crc32
    return checksums


def _measure(location: TensorLocation, dtype: DType) -> _Extent:
    """Return the bytes of a tensor in the record of its storage."""
    shape, strides = location.shape, location.strides
    start = location.offset * dtype.size
    # A shortcut for the most frequent shape.
    if len(shape) == 1:
        elements, last = shape[0], (shape[0] - 1) * strides[0]
    else:
        elements, last = math.prod(shape), 0
        for size, stride in zip(shape, strides, strict=True):
            last += (size - 1) * stride
    end = (location.offset + last + 1) * dtype.size if elements > 0 else 0
    return _Extent(start, end, elements * dtype.size)


def _check_record(
    name: str, location: TensorLocation, dtype: DType, extent: _Extent, record: Record, path: str
) -> None:
    """Check that a tensor ends within the record of its storage, and that the record has the size of its storage."""
    if extent.end > record.size:
        raise MalformedFile(
            path,
            place=record.label,
            found=f"tensor '{name}' ends at byte {extent.end} of a record of {record.size}",
            needed=f"{extent.end} bytes for {dtype.name} {list(location.shape)}",
            next_step=_AGAIN,
        )

    assert location.storage is not None
    numel = location.storage.numel
    itemsize = location.storage.itemsize or dtype.size
    storage_size = numel * itemsize
    # Storages that are shared between dtypes may have a remainder.
    if not 0 <= record.size - storage_size < itemsize:
        raise MalformedFile(
            path,
            place=record.label,
            found=f"a storage of {numel} elements, {storage_size} bytes, in a record of {record.size}",
            needed="equal sizes, up to a partial element",
            next_step=_AGAIN,
        )
    if extent.size > MOST_ELEMENTS:
        raise MalformedFile(
            path,
            place=record.label,
            found=f"tensor '{name}' of sizes {brief(location.shape)} has more than 2**63 bytes",
            needed="fewer",
            next_step="no library writes this; check the origin of the file",
        )
