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
    # Elements of one index of each dimension.
    slice_sizes = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while count:
        axis = _find_axis(slice_sizes, start, count)
        if axis is None:
            yield ()
            return

        box = []
        for length, size in zip(shape[:axis], slice_sizes, strict=False):
            index = start // size % length
            box.append(slice(index, index + 1))

        first_row = start // slice_sizes[axis] % shape[axis]
        rows = min(count // slice_sizes[axis], shape[axis] - first_row)
        box.append(slice(first_row, first_row + rows))
        box += [slice(0, length) for length in shape[axis + 1 :]]
        yield tuple(box)

        start += rows * slice_sizes[axis]
        count -= rows * slice_sizes[axis]


def _find_axis(slice_sizes: Sequence[int], start: int, count: int) -> int | None:
    """Return the outermost dimension with whole slices in the range; None if there are no dimensions.

    In the last dimension, slices are single elements.
    """
    for axis, size in enumerate(slice_sizes):
        is_at_start = start % size == 0
        if is_at_start and count >= size:
            return axis

    return None


def assemble(tensor: Tensor, start: int, count: int, fetch: Fetch) -> bytes | bytearray:
    """Return `count` elements from element `start` on, in C order, of a tensor that is stored in parts.

    fetch: reads elements of one part, given start and count. Its result may become invalid with the next call.
    """
    size = DTYPES[tensor.dtype].size
    result = bytearray(count * size)
    box_start = 0
    for box in split_into_boxes(tensor.shape, start, count):
        box_end = box_start + _volume(box) * size
        for part in _select_parts(tensor, box):
            cut = _intersect(box, part)
            if cut is None:
                continue

            first = [span.start - start for span, start in zip(cut, part.start, strict=True)]
            first_element = ravel_index(first, part.tensor.shape)
            data = fetch(part.tensor, first_element, _volume(cut))
            # One part contains the whole range.
            if len(data) == len(result):
                return data

            _copy_into(
                memoryview(result)[box_start:box_end],
                box,
                cut,
                data,
                size,
            )

        box_start = box_end

    return result


def _select_parts(tensor: Tensor, box: Box) -> Sequence[Shard]:
    """Return the parts with indices of the box in the first dimension: a fast test, because there can be thousands."""
    if not box:
        return tensor.shards

    low = box[0].start
    high = box[0].stop
    return [part for part in tensor.shards if part.start[0] < high and part.start[0] + part.tensor.shape[0] > low]


def _length(span: slice) -> int:
    length: int = span.stop - span.start
    return length


def _volume(box: Box) -> int:
    return math.prod(_length(span) for span in box)


def _intersect(box: Box, part: Shard) -> Box | None:
    """Return the intersection of a box and a part, None if it is empty."""
    cut = []
    for span, start, length in zip(box, part.start, part.tensor.shape, strict=True):
        low = max(span.start, start)
        high = min(span.stop, start + length)
        if low >= high:
            return None

        cut.append(slice(low, high))

    return tuple(cut)


def _copy_into(target: memoryview, box: Box, cut: Box, data: bytes | bytearray, size: int) -> None:
    """Copy the bytes of a cut to their positions in the buffer of its box. size: bytes per element."""
    axis = _find_first_long_axis(box)
    if cut[axis + 1 :] == box[axis + 1 :]:
        begin = (cut[axis].start - box[axis].start) * _volume(box[axis + 1 :]) * size
        target[begin : begin + len(data)] = data
        return

    import numpy as np  # only needed if rows of the box consist of several parts

    shape = []
    spans = []
    for box_span, cut_span in zip(box, cut, strict=True):
        length = _length(box_span)
        # numpy before version 2 supports 32 dimensions.
        if length != 1:
            first = cut_span.start - box_span.start
            shape.append(length)
            spans.append(slice(first, first + _length(cut_span)))

    # Copy bytes, not elements: numpy then copies contiguous runs at once for every dtype.
    shape[-1] *= size
    spans[-1] = slice(spans[-1].start * size, spans[-1].stop * size)
    target_cut = np.ndarray(shape, np.uint8, target)[tuple(spans)]
    elements = np.frombuffer(data, np.uint8)
    target_cut[...] = elements.reshape(target_cut.shape)


def _find_first_long_axis(box: Box) -> int:
    """Return the first dimension in which a box has several indices; 0 if there is none."""
    long_axes = (axis for axis, span in enumerate(box) if _length(span) > 1)
    return next(long_axes, 0)
