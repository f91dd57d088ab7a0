"""The location of a tensor's bytes in the file, after checking that its storage contains them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from syncheck.errors import MalformedFile
from syncheck.messages import Refusal
from syncheck.snapshots import MOST_ELEMENTS, Tensor, contiguous_strides
from syncheck.text import brief

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from syncheck.readers.pickles.stand_ins import Storage, TensorLocation
    from syncheck.tensors.dtypes import DType

_AGAIN = "the file is cut short or damaged: save or copy the file again"
# Limit for the bytes of an expanded or overlapping view beyond its stored bytes, minutes of reading: a 1 kB file can
# claim any number.
_MOST_VIEWED = 1 << 36


@dataclass(frozen=True, slots=True)
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
    dtype, shape, strides = location.dtype, location.shape, location.strides
    is_stored = location.storage is not None or location.data is not None
    if location.refused or dtype is None or not is_stored:
        return _describe_refused(name, location, path)
    if location.storage is None:
        data, sharding = location.data, location.sharding
        return Tensor(name, dtype.name, shape, strides, path, 0, location.big_endian, data=data, sharding=sharding)

    record = record_of(location.storage)
    elements, last = _measure(shape, strides)
    start = location.offset * dtype.size
    end = 0 if 0 in shape else (location.offset + last + 1) * dtype.size
    size = elements * dtype.size
    _check_record(name, location, dtype, end, record, path)
    if size > MOST_ELEMENTS:
        raise MalformedFile(
            path,
            place=record.label,
            found=f"tensor '{name}' of sizes {brief(shape)} has more than 2**63 bytes",
            needed="fewer",
            next_step="no library writes this; check the origin of the file",
        )
    if size > max(record.size, _MOST_VIEWED):
        refused = Refusal.HUGE_VIEW(stored=record.size, shown=size)
        return Tensor(name, dtype.name, shape, strides, path, 0, refused=refused)
    if record.data is not None:
        return Tensor(name, dtype.name, shape, strides, path, start, big_endian, location.lazy, data=record.data)

    is_whole_record = not location.offset and last + 1 == elements == record.size / dtype.size
    return Tensor(
        name,
        dtype.name,
        shape,
        strides,
        path,
        record.start + start,
        big_endian,
        location.lazy,
        opened=opened,
        sharding=location.sharding,
        **_list_checksums(record, is_whole_record=is_whole_record),
    )


def _describe_refused(name: str, location: TensorLocation, path: str) -> Tensor:
    """Return a tensor that cannot be compared."""
    dtype_name = "unknown" if location.dtype is None else location.dtype.name
    # Every tensor has one stride per dimension, also without readable elements.
    strides = contiguous_strides(location.shape)
    refused = location.refused or Refusal.STORAGE_WITHOUT_DTYPE()
    return Tensor(name, dtype_name, location.shape, strides, path, 0, refused=refused)


def _list_checksums(record: Record, *, is_whole_record: bool) -> dict[str, Any]:
    """Return the fields of a tensor with checksums.

    is_whole_record: whether the tensor and the record have the same bytes in the same order.
    """
    if not record.crc32:
        return {}
    checksums: dict[str, Any] = {"record": (record.crc32, record.start, record.size)}
    if is_whole_record:
        checksums["crc32"] = record.crc32
    return checksums


def _measure(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of elements, and the distance from the first element in memory to the last."""
    if len(shape) == 1:  # a shortcut for the most frequent shape
        return shape[0], (shape[0] - 1) * strides[0]
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        last += (size - 1) * stride
    return math.prod(shape), last


def _check_record(name: str, location: TensorLocation, dtype: DType, end: int, record: Record, path: str) -> None:
    """Check that a tensor ends within the record of its storage, and that the record has the size of its storage.

    end: of the tensor, in bytes of the record.
    """
    if end > record.size:
        raise MalformedFile(
            path,
            place=record.label,
            found=f"tensor '{name}' ends at byte {end} of a record of {record.size}",
            needed=f"{end} bytes for {dtype.name} {list(location.shape)}",
            next_step=_AGAIN,
        )
    assert location.storage is not None
    numel = location.storage.numel
    itemsize = location.storage.itemsize or dtype.size
    size = numel * itemsize
    # Storages that are shared between dtypes may have a remainder.
    if not 0 <= record.size - size < itemsize:
        raise MalformedFile(
            path,
            place=record.label,
            found=f"a storage of {numel} elements, {size} bytes, in a record of {record.size}",
            needed="equal sizes, up to a partial element",
            next_step=_AGAIN,
        )
