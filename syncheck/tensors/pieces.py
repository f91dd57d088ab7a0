"""Read ranges of tensors that are stored in pieces, as in sharded checkpoints.

A range of elements in C order is the union of a few boxes: single indices in the leading dimensions, a slice of one
dimension, and all of the remaining dimensions. The intersection of a box and a piece is contiguous in the piece. Each
piece is therefore read with one call, and memory is bounded by the size of the range.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.snapshots import ravel_index
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.snapshots import Shard, Tensor

    Fetch = Callable[[Tensor, int, int], bytes | bytearray]

Box = tuple[slice, ...]


def split_into_boxes(shape: Sequence[int], start: int, count: int) -> Iterator[Box]:
    """Yield the boxes of `count` elements from element `start` on, in C order; at most two per dimension."""
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while count:
        # The outermost dimension with whole slices in the range. In the last dimension, slices are single elements.
        axis = next((i for i, size in enumerate(inner) if start % size == 0 and count >= size), None)
        if axis is None:
            yield ()
            return
        index = [start // size % length for size, length in zip(inner, shape, strict=True)]
        rows = min(count // inner[axis], shape[axis] - index[axis])
        single = [slice(at, at + 1) for at in index[:axis]]
        yield (*single, slice(index[axis], index[axis] + rows), *(slice(0, length) for length in shape[axis + 1 :]))
        start += rows * inner[axis]
        count -= rows * inner[axis]


def assemble(tensor: Tensor, start: int, count: int, fetch: Fetch) -> bytes | bytearray:
    """Return `count` elements from element `start` on, in C order, of a tensor that is stored in parts.

    fetch: reads elements of one part, given start and count. Its result may become invalid with the next call.
    """
    size = DTYPES[tensor.dtype].size
    result = bytearray(count * size)
    at = 0
    for box in split_into_boxes(tensor.shape, start, count):
        volume = _volume(box)
        parts = tensor.shards
        if box:  # a fast test, because a tensor can have thousands of parts
            low, high = box[0].start, box[0].stop
            parts = tuple(p for p in parts if p.start[0] < high and p.start[0] + p.tensor.shape[0] > low)
        for part in parts:
            cut = _intersect(box, part)
            if cut is None:
                continue
            first = [span.start - start for span, start in zip(cut, part.start, strict=True)]
            data = fetch(part.tensor, ravel_index(first, part.tensor.shape), _volume(cut))
            if len(data) == len(result):  # one part contains the whole range
                return data
            _copy_into(memoryview(result)[at * size : (at + volume) * size], box, cut, data, size)
        at += volume
    return result


def _volume(box: Box) -> int:
    return math.prod(span.stop - span.start for span in box)


def _intersect(box: Box, part: Shard) -> Box | None:
    """Return the intersection of a box and a part, None if it is empty."""
    cut = []
    for span, start, length in zip(box, part.start, part.tensor.shape, strict=True):
        low, high = max(span.start, start), min(span.stop, start + length)
        if low >= high:
            return None
        cut.append(slice(low, high))
    return tuple(cut)


def _copy_into(to: memoryview, box: Box, cut: Box, data: bytes | bytearray, size: int) -> None:
    """Copy the bytes of a cut to their positions in the buffer of its box. size: bytes per element."""
    axis = next((i for i, span in enumerate(box) if span.stop - span.start > 1), 0)
    if all(part == whole for part, whole in zip(cut[axis + 1 :], box[axis + 1 :], strict=True)):
        begin = (cut[axis].start - box[axis].start) * _volume(box[axis + 1 :]) * size
        to[begin : begin + len(data)] = data
        return
    import numpy as np  # only needed if rows of the box consist of several parts

    shape, spans = [], []
    # Drop dimensions of length 1: numpy before version 2 supports 32 dimensions.
    for whole, part in [both for both in zip(box, cut, strict=True) if both[0].stop - both[0].start != 1]:
        shape.append(whole.stop - whole.start)
        spans.append(slice(part.start - whole.start, part.stop - whole.start))
    # Copy bytes, not elements: numpy then copies contiguous runs at once for every dtype.
    shape[-1] *= size
    spans[-1] = slice(spans[-1].start * size, spans[-1].stop * size)
    target = np.ndarray(shape, np.uint8, to)[tuple(spans)]
    target[...] = np.frombuffer(data, np.uint8).reshape(target.shape)
