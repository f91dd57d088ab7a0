"""Read tensors that need conversion: strides other than C order, byte order, pending conjugation or negation.

A block is read in pieces, or copied from a memory map if it has too many pieces. This module needs numpy and is
imported only for such tensors.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from syncheck.errors import UnreadableFile
from syncheck.snapshots import contiguous_strides
from syncheck.tensors import pieces
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.open_files import truncated_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.snapshots import Tensor
    from syncheck.tensors.open_files import OpenFiles

# Maximum gap in bytes between the elements of one read, and maximum size of a read relative to its elements.
_MOST_GAP, _MOST_TIMES = 4096, 8
# A block that needs more reads, for example of a transposed matrix, is copied from a memory map: twice as fast.
_MOST_READS = 1024


class _Plan(NamedTuple):
    """How a box is read.

    outer: dimensions with one read per index.
    inner: dimensions within one read.
    length: bytes of one read.
    """

    outer: list[int]
    inner: list[int]
    length: int


def read_strided(files: OpenFiles, tensor: Tensor, start: int, count: int) -> bytes:
    """Return `count` elements from element `start` on, in C order, as little-endian bytes.

    Applies pending operations. Raises MalformedFile if the file has been truncated since it was opened.
    """
    row = DTYPES[tensor.dtype]
    tensor = _drop_single_dimensions(tensor)
    view = None if tensor.data is None else _view_data(tensor, row.size)
    rows = []
    for box in pieces.split_into_boxes(tensor.shape, start, count):
        if view is None:
            rows.append(_read_box(files, tensor, box, row.size))
        else:
            rows.append(np.ascontiguousarray(view[box]).reshape(-1))

    byte_order = ">" if tensor.big_endian else "<"
    values = np.concatenate(rows).view(row.dtype().newbyteorder(byte_order))
    if "conj" in tensor.lazy:
        values = np.conjugate(values)

    if "neg" in tensor.lazy:
        values = np.negative(values)

    little_endian = row.dtype().newbyteorder("<")
    return bytes(values.astype(little_endian, copy=False).tobytes())


def _drop_single_dimensions(tensor: Tensor) -> Tensor:
    """Return a tensor without dimensions of length 1, because numpy supports fewer dimensions than torch."""
    if 1 not in tensor.shape:
        return tensor

    shape = []
    strides = []
    for length, stride in zip(tensor.shape, tensor.strides, strict=True):
        if length != 1:
            shape.append(length)
            strides.append(stride)

    return replace(tensor, shape=tuple(shape), strides=tuple(strides))


def _view_data(tensor: Tensor, size: int) -> Any:
    """Return a view of the data of a tensor in memory. size: bytes per element."""
    strides = [stride * size for stride in tensor.strides]
    end = tensor.offset + _count_bytes(tensor.shape, strides, size)
    # Data on another rank is fetched by slices.
    data: Any = tensor.data
    if not isinstance(data, bytes):
        data = data[0:end]

    return np.ndarray(tensor.shape, f"V{size}", data, tensor.offset, strides)


def _count_bytes(lengths: Sequence[int], strides: Sequence[int], size: int) -> int:
    """Return the bytes from the first to the last element. strides: in bytes. size: bytes per element."""
    return size + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def _read_box(files: OpenFiles, tensor: Tensor, box: pieces.Box, size: int) -> Any:
    """Return the elements of a box of a strided tensor, in C order. size: bytes per element.

    Prefers reads to memory maps: if a mapped file is truncated, SIGBUS kills the process.
    """
    # A block is small, so few of its dimensions are longer than 1, and every version of numpy supports them.
    offset = tensor.offset
    lengths = []
    strides = []
    for span, stride in zip(box, tensor.strides, strict=True):
        offset += span.start * stride * size
        if span.stop - span.start != 1:
            lengths.append(span.stop - span.start)
            strides.append(stride * size)

    plan = _plan_reads(lengths, strides, size)
    reads = math.prod(lengths[axis] for axis in plan.outer)
    if reads > _MOST_READS:
        return _copy_from_map(
            files,
            tensor,
            offset,
            lengths,
            strides,
            size,
        )

    offsets = np.full((), offset, np.int64)
    for axis in plan.outer:
        steps = np.arange(lengths[axis], dtype=np.int64) * strides[axis]
        offsets = np.add.outer(offsets, steps)

    descriptor = files.descriptor(tensor)
    try:
        data = b"".join([os.pread(descriptor, plan.length, start) for start in offsets.reshape(-1).tolist()])
    except OSError as error:
        raise UnreadableFile.because(tensor.path, error) from None

    if len(data) != plan.length * reads:
        raise truncated_file(tensor)

    # The results of the reads are consecutive, so the outer dimensions have new strides.
    order = [*plan.outer, *plan.inner]
    read_strides = [stride * plan.length for stride in contiguous_strides(offsets.shape)]
    read_strides += [strides[axis] for axis in plan.inner]
    read_shape = [lengths[axis] for axis in order]
    view: Any = np.ndarray(read_shape, f"V{size}", data, 0, read_strides)
    original_order = np.argsort(order).tolist()
    return np.ascontiguousarray(view.transpose(original_order)).reshape(-1)


def _plan_reads(lengths: Sequence[int], strides: Sequence[int], size: int) -> _Plan:
    """Choose the dimensions within one read, so that a read has few gaps.

    lengths: in elements. strides: in bytes. size: bytes per element.
    """
    # Bytes from the first to the last index of each dimension. The dimension with the most may be left out first.
    reaches = [(length - 1) * stride for length, stride in zip(lengths, strides, strict=True)]
    inner = sorted(range(len(lengths)), key=reaches.__getitem__, reverse=True)
    outer: list[int] = []
    useful_bytes = size * math.prod(lengths)
    read_bytes = size + sum(reaches)
    while inner:
        axis = inner[0]
        fewer_bytes = read_bytes - reaches[axis]
        gap = strides[axis] - fewer_bytes
        most_bytes = _MOST_TIMES * useful_bytes
        if gap <= _MOST_GAP and read_bytes <= most_bytes:
            break

        outer.append(inner.pop(0))
        read_bytes = fewer_bytes
        useful_bytes //= lengths[axis]

    return _Plan(outer, inner, read_bytes)


def _copy_from_map(
    files: OpenFiles, tensor: Tensor, offset: int, lengths: Sequence[int], strides: Sequence[int], size: int
) -> Any:
    """Return the elements of a box of a strided tensor. Arguments as in `_plan_reads`; offset: of the box."""
    mapping = files.mapping(tensor)
    end = offset + _count_bytes(lengths, strides, size)
    if mapping.size() < end:  # size() returns the current size of the file
        raise truncated_file(tensor)

    view: Any = np.ndarray(lengths, f"V{size}", mapping, offset, strides)
    return view.flatten()
