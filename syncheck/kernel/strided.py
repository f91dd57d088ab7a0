"""Tensors whose bytes do not lie as they are compared: other strides or byte order, a conjugation or negation to do.

A block of such a tensor is gathered: read piece by piece, or copied from a mapping where that would be many reads.
Imported when there is such a tensor: it needs numpy.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from syncheck.dtypes import DTYPES
from syncheck.errors import UnreadableFile
from syncheck.kernel import pieces
from syncheck.kernel.open_files import truncated_file
from syncheck.snapshots import in_c_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.kernel.open_files import OpenFiles
    from syncheck.snapshots import Tensor

# Of a tensor that does not lie in C order, a gap of up to so many bytes is read along with what lies around it, unless
# that makes it so many times the bytes that are wanted. What needs more reads than that, as of a matrix that lies
# transposed, is copied from a mapping of the file: twice as fast.
_MOST_GAP, _MOST_TIMES, _MOST_READS = 4096, 8, 1024


def read_strided(files: OpenFiles, tensor: Tensor, start: int, count: int) -> bytes:
    """Return `count` elements from element `start` on, in C order, as little-endian bytes, without what is lazy.

    Raises MalformedFile when the file has become shorter since it was opened.
    """
    row = DTYPES[tensor.dtype]
    if 1 in tensor.shape:  # their strides mean nothing, and numpy has fewer dimensions than torch
        kept = [both for both in zip(tensor.shape, tensor.strides, strict=True) if both[0] != 1]
        tensor = replace(tensor, shape=tuple(n for n, _ in kept), strides=tuple(s for _, s in kept))
    boxes = list(pieces.split_into_boxes(tensor.shape, start, count))
    if tensor.data is None:
        rows = [_gathered(files, tensor, box, row.size) for box in boxes]
    else:
        data, steps = cast("Any", tensor.data), [s * row.size for s in tensor.strides]
        view: Any = np.ndarray(tensor.shape, f"V{row.size}", data, tensor.offset, steps)
        rows = [np.ascontiguousarray(view[box]).reshape(-1) for box in boxes]
    values = np.concatenate(rows).view(row.dtype().newbyteorder(">" if tensor.big_endian else "<"))
    if "conj" in tensor.lazy:
        values = np.conjugate(values)
    if "neg" in tensor.lazy:
        values = np.negative(values)
    return bytes(values.astype(row.dtype().newbyteorder("<"), copy=False).tobytes())


def _gathered(files: OpenFiles, tensor: Tensor, box: pieces.Box, size: int) -> Any:
    """Return a box of a tensor whose elements do not lie in C order: its elements, in C order.

    By reads where it can be: a mapping of a file that is cut while it is copied kills the process.
    size: bytes of an element.
    """
    at = tensor.offset + size * sum(span.start * step for span, step in zip(box, tensor.strides, strict=True))
    # Of few elements, few dimensions are longer than 1: no more than any numpy takes.
    long = [axis for axis, span in enumerate(box) if span.stop - span.start != 1]
    lengths, strides = [box[i].stop - box[i].start for i in long], [tensor.strides[i] * size for i in long]
    outer, inner, reach = _apart(lengths, strides, size)
    reads = math.prod(lengths[axis] for axis in outer)
    if reads > _MOST_READS:
        return _from_map(files, tensor, at, lengths, strides, size)
    places = np.full((), at, np.int64)
    for axis in outer:
        places = np.add.outer(places, np.arange(lengths[axis], dtype=np.int64) * strides[axis])
    descriptor = files.descriptor(tensor)
    try:
        data = b"".join([os.pread(descriptor, reach, place) for place in places.reshape(-1).tolist()])
    except OSError as error:
        raise UnreadableFile.because(tensor.path, error) from None
    if len(data) != reach * reads:
        raise truncated_file(tensor)
    order = (*outer, *inner)
    steps = [*(stride * reach for stride in in_c_order(places.shape)), *(strides[axis] for axis in inner)]
    found: Any = np.ndarray([lengths[axis] for axis in order], f"V{size}", data, 0, steps)
    back = sorted(range(len(order)), key=order.__getitem__)
    return np.ascontiguousarray(found.transpose(back)).reshape(-1)


def _apart(lengths: Sequence[int], strides: Sequence[int], size: int) -> tuple[list[int], list[int], int]:
    """Choose the dimensions along which a box is read piece by piece, and those that lie within one read.

    lengths: in elements; strides, size of an element: in bytes. Returns both, and how many bytes a read has.
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


def _from_map(
    files: OpenFiles, tensor: Tensor, at: int, lengths: Sequence[int], strides: Sequence[int], size: int
) -> Any:
    where = files.mapping(tensor)
    end = at + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + size
    if where.size() < end:  # of the file as it is now
        raise truncated_file(tensor)
    view: Any = np.ndarray(lengths, f"V{size}", where, at, strides)
    return view.flatten()
