"""Tensors that are stored in pieces, as sharded checkpoints hold them: any range of elements, put together.

A range of elements in C order is a few boxes: single indices in the leading dimensions, a run in one, all of the rest.
Of a piece, such a box cuts out elements that are adjacent in the piece's own C order, so that each piece is read with
one call, and nothing larger than the range is ever held, whatever the pieces' shapes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from syncheck.snapshots import Part, Tensor

    Fetch = Callable[[Tensor, int, int], bytes | bytearray]

Box = tuple[slice, ...]


def split_into_boxes(shape: Sequence[int], start: int, count: int) -> Iterator[Box]:
    """Cut `count` elements from element `start` on, in C order, into boxes; at most two for each dimension."""
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while count:
        # The outermost dimension of which whole slices can be taken; in the last one, slices are single elements.
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

    fetch: reads so many elements from an element on of one of the parts; its result need not outlive the next call.
    """
    size = DTYPES[tensor.dtype].size
    found = bytearray(count * size)
    at = 0
    for box in split_into_boxes(tensor.shape, start, count):
        volume = _volume(box)
        for part in tensor.parts:
            cut = _cut(box, part)
            if cut is None:
                continue
            data = fetch(part.tensor, _first(cut, part), _volume(cut))
            if len(data) == len(found):  # all of it lies in one part
                return data
            _put(memoryview(found)[at * size : (at + volume) * size], box, cut, data, size)
        at += volume
    return found


def _volume(box: Box) -> int:
    return math.prod(span.stop - span.start for span in box)


def _cut(box: Box, part: Part) -> Box | None:
    """Return what a box and a part have in common, None if nothing."""
    cut = []
    for span, start, length in zip(box, part.start, part.tensor.shape, strict=True):
        low, high = max(span.start, start), min(span.stop, start + length)
        if low >= high:
            return None
        cut.append(slice(low, high))
    return tuple(cut)


def _first(cut: Box, part: Part) -> int:
    """Return the place of a cut's first element in the C order of the part."""
    flat = 0
    for span, start, length in zip(cut, part.start, part.tensor.shape, strict=True):
        flat = flat * length + span.start - start
    return flat


def _put(to: memoryview, box: Box, cut: Box, data: bytes | bytearray, size: int) -> None:
    """Copy a cut's bytes to where they belong among those of its box."""
    axis = next((i for i, span in enumerate(box) if span.stop - span.start > 1), 0)
    if all(part == whole for part, whole in zip(cut[axis + 1 :], box[axis + 1 :], strict=True)):
        begin = (cut[axis].start - box[axis].start) * _volume(box[axis + 1 :]) * size
        to[begin : begin + len(data)] = data
        return
    import numpy as np  # rows of the box are put together from several parts

    shape, spans = [], []
    # Without dimensions of length 1: numpy before version 2 has 32 at most.
    for whole, part in [both for both in zip(box, cut, strict=True) if both[0].stop - both[0].start != 1]:
        shape.append(whole.stop - whole.start)
        spans.append(slice(part.start - whole.start, part.stop - whole.start))
    # As bytes: numpy copies runs of them at once, whatever the dtype.
    shape[-1] *= size
    spans[-1] = slice(spans[-1].start * size, spans[-1].stop * size)
    target = np.ndarray(shape, np.uint8, to)[tuple(spans)]
    target[...] = np.frombuffer(data, np.uint8).reshape(target.shape)
