"""Locate the bytes of a tensor in a file, and check that they are within its storage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile
from syncheck.messages import Refusal
from syncheck.snapshots import MOST_ELEMENTS, Tensor, contiguous_strides
from syncheck.text import brief

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from syncheck.readers.pickles.stand_ins import Storage, TensorLocation

_AGAIN = "the file is cut short or damaged: save or copy the file again"
# Limit for the bytes of an expanded or overlapping view beyond its stored bytes, minutes of reading: a 1 kB file can
# claim any number.
_MOST_SHOWN = 1 << 36


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
