"""Read tensors that need conversion: strides other than C order, byte order, pending conjugation or negation.

A block is read in pieces, or copied from a memory map if it has too many pieces. This module needs numpy and is
imported only for such tensors.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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


def read_strided(files: OpenFiles, tensor: Tensor, start: int, count: int) -> bytes:
    """Return `count` elements from element `start` on, in C order, as little-endian bytes.

    Applies pending operations. Raises MalformedFile if the file has been truncated since it was opened.
    """
    row = DTYPES[tensor.dtype]
    if 1 in tensor.shape:  # numpy supports fewer dimensions than torch
        kept = [both for both in zip(tensor.shape, tensor.strides, strict=True) if both[0] != 1]
        tensor = replace(tensor, shape=tuple(n for n, _ in kept), strides=tuple(s for _, s in kept))
    boxes = list(pieces.split_into_boxes(tensor.shape, start, count))
    if tensor.data is None:
        rows = [_read_box(files, tensor, box, row.size) for box in boxes]
    else:
        steps = [s * row.size for s in tensor.strides]
        end = tensor.offset + row.size + sum((n - 1) * step for n, step in zip(tensor.shape, steps, strict=True))
        # Data on another rank is fetched by slices.
        data: Any = tensor.data if isinstance(tensor.data, bytes) else tensor.data[0:end]
        view: Any = np.ndarray(tensor.shape, f"V{row.size}", data, tensor.offset, steps)
        rows = [np.ascontiguousarray(view[box]).reshape(-1) for box in boxes]
    values = np.concatenate(rows).view(row.dtype().newbyteorder(">" if tensor.big_endian else "<"))
    if "conj" in tensor.lazy:
        values = np.conjugate(values)
    if "neg" in tensor.lazy:
        values = np.negative(values)
    return bytes(values.astype(row.dtype().newbyteorder("<"), copy=False).tobytes())


def _read_box(files: OpenFiles, tensor: Tensor, box: pieces.Box, size: int) -> Any:
    """Return the elements of a box of a strided tensor, in C order. size: bytes per element.

    Prefers reads to memory maps: if a mapped file is truncated, SIGBUS kills the process.
    """
    at = tensor.offset + size * sum(span.start * step for span, step in zip(box, tensor.strides, strict=True))
    # A block is small, so few of its dimensions are longer than 1, and every version of numpy supports them.
    long = [axis for axis, span in enumerate(box) if span.stop - span.start != 1]
    lengths, strides = [box[i].stop - box[i].start for i in long], [tensor.strides[i] * size for i in long]
    outer, inner, reach = _choose_read_dimensions(lengths, strides, size)
    reads = math.prod(lengths[axis] for axis in outer)
    if reads > _MOST_READS:
        return _copy_from_map(files, tensor, at, lengths, strides, size)
    offsets = np.full((), at, np.int64)
    for axis in outer:
        offsets = np.add.outer(offsets, np.arange(lengths[axis], dtype=np.int64) * strides[axis])
    descriptor = files.descriptor(tensor)
    try:
        data = b"".join([os.pread(descriptor, reach, offset) for offset in offsets.reshape(-1).tolist()])
    except OSError as error:
        raise UnreadableFile.because(tensor.path, error) from None
    if len(data) != reach * reads:
        raise truncated_file(tensor)
    order = (*outer, *inner)
    steps = [*(stride * reach for stride in contiguous_strides(offsets.shape)), *(strides[axis] for axis in inner)]
    view: Any = np.ndarray([lengths[axis] for axis in order], f"V{size}", data, 0, steps)
    back = sorted(range(len(order)), key=order.__getitem__)
    return np.ascontiguousarray(view.transpose(back)).reshape(-1)


def _choose_read_dimensions(
    lengths: Sequence[int], strides: Sequence[int], size: int
) -> tuple[list[int], list[int], int]:
    """Return the dimensions with one read per index, the dimensions within one read, and the bytes of one read.

    lengths: in elements. strides: in bytes. size: bytes per element.
    """
    inner = sorted(range(len(lengths)), key=lambda axis: -(lengths[axis] - 1) * strides[axis])
    outer: list[int] = []
    wanted = size * math.prod(lengths)
    reach = size + sum((lengths[axis] - 1) * strides[axis] for axis in inner)
    while inner:
        length, stride = lengths[inner[0]], strides[inner[0]]
        without = reach - (length - 1) * stride
        if reach <= _MOST_TIMES * wanted and stride - without <= _MOST_GAP:
            break
        outer.append(inner.pop(0))
        reach, wanted = without, wanted // length
    return outer, inner, reach


def _copy_from_map(
    files: OpenFiles, tensor: Tensor, at: int, lengths: Sequence[int], strides: Sequence[int], size: int
) -> Any:
    mapping = files.mapping(tensor)
    end = at + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + size
    if mapping.size() < end:  # size() returns the current size of the file
        raise truncated_file(tensor)
    view: Any = np.ndarray(lengths, f"V{size}", mapping, at, strides)
    return view.flatten()
