"""Views of tensors: their elements in another shape, another order, or together with other tensors.

The bytes stay where they are: a view is a tensor in boxes, each a strided part of a file. Names of operations and of
their parameters are those of torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.snapshots import Shard, Tensor, contiguous_strides
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.pieces import split_into_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def unflatten(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the view with dimension `dim` divided into dimensions of these sizes, whose product is its length."""
    if math.prod(sizes) != tensor.shape[dim]:
        raise ValueError(f"{list(sizes)} are no parts of {tensor.shape[dim]}")

    inner = contiguous_strides(tuple(sizes))
    boxes = []
    for box in list_shards(tensor):
        local, first = box.tensor, box.start[dim]
        for spans in split_into_boxes(sizes, first, local.shape[dim]):
            start = tuple(span.start for span in spans)
            size = tuple(span.stop - span.start for span in spans)
            skipped = sum(at * stride for at, stride in zip(start, inner, strict=True)) - first
            part = _restride(
                local,
                skipped * local.strides[dim],
                (*local.shape[:dim], *size, *local.shape[dim + 1 :]),
                (*local.strides[:dim], *(s * local.strides[dim] for s in inner), *local.strides[dim + 1 :]),
            )
            boxes.append(Shard(part, (*box.start[:dim], *start, *box.start[dim + 1 :])))

    return _from_shards(tensor, (*tensor.shape[:dim], *sizes, *tensor.shape[dim + 1 :]), boxes)


def permute(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the view with the dimensions in this order."""

    def order(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    boxes = [
        Shard(_restride(box.tensor, 0, order(box.tensor.shape), order(box.tensor.strides)), order(box.start))
        for box in list_shards(tensor)
    ]
    return _from_shards(tensor, order(tensor.shape), boxes)


def narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return the view of `length` indices from `start` on, in dimension `dim`."""
    boxes = []
    for box in list_shards(tensor):
        local, first = box.tensor, box.start[dim]
        # Only the part of the box within the range remains.
        low, high = max(start, first), min(start + length, first + local.shape[dim])
        if low >= high:
            continue

        shape = (*local.shape[:dim], high - low, *local.shape[dim + 1 :])
        part = _restride(local, (low - first) * local.strides[dim], shape, local.strides)
        boxes.append(Shard(part, (*box.start[:dim], low - start, *box.start[dim + 1 :])))

    return _from_shards(tensor, (*tensor.shape[:dim], length, *tensor.shape[dim + 1 :]), boxes)


def flatten(tensor: Tensor, dim: int) -> Tensor:
    """Return the view with dimensions `dim` and `dim + 1` as one dimension."""
    length, inner = tensor.shape[dim : dim + 2]
    boxes: list[Shard] = []
    for box in list_shards(tensor):
        local, first = box.tensor, box.start
        rows, size = local.shape[dim : dim + 2]
        outer_stride, stride = local.strides[dim : dim + 2]
        # Indices of a dimension are consecutive in the result if the box has all inner indices, or one outer index.
        joined = rows == 1 or (size == inner and (size == 1 or outer_stride == size * stride))
        for i in [0] if joined else range(rows):
            count = rows * size if joined else size
            step = outer_stride if size == 1 and rows > 1 else stride
            part = _restride(
                local,
                i * outer_stride,
                (*local.shape[:dim], count, *local.shape[dim + 2 :]),
                (*local.strides[:dim], step, *local.strides[dim + 2 :]),
            )
            boxes.append(Shard(part, (*first[:dim], (first[dim] + i) * inner + first[dim + 1], *first[dim + 2 :])))

    return _from_shards(tensor, (*tensor.shape[:dim], length * inner, *tensor.shape[dim + 2 :]), boxes)


def unstack(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor at each index of dimension 0, without this dimension."""
    for i in range(tensor.shape[0]):
        row = narrow(tensor, 0, i, 1)
        boxes = [
            Shard(_restride(box.tensor, 0, box.tensor.shape[1:], box.tensor.strides[1:]), box.start[1:])
            for box in list_shards(row)
        ]
        yield _from_shards(tensor, tensor.shape[1:], boxes)


def find_element(tensor: Tensor, view: Tensor, index: Sequence[int]) -> tuple[int, ...] | None:
    """Return the index in a tensor of an element of a view of it; None if its strides do not show it."""

    def holds(box: Shard, at: Sequence[int]) -> bool:
        spans = zip(at, box.start, box.tensor.shape, strict=True)
        return all(start <= i < start + length for i, start, length in spans)

    shard = next((shard for shard in list_shards(view) if holds(shard, index)), None)
    if shard is None:
        return None

    size = DTYPES[tensor.dtype].size
    steps = zip(index, shard.start, shard.tensor.strides, strict=True)
    offset = shard.tensor.offset + size * sum((number - start) * stride for number, start, stride in steps)
    for candidate in list_shards(tensor):
        # Bytes in memory have no path.
        is_same_file = candidate.tensor.path == shard.tensor.path and candidate.tensor.data is shard.tensor.data
        skipped, misalignment = divmod(offset - candidate.tensor.offset, size)
        if not is_same_file or skipped < 0 or misalignment:
            continue

        position = _find_index(candidate.tensor, skipped)
        if position is not None:
            return tuple(start + number for start, number in zip(candidate.start, position, strict=True))

    return None


def _find_index(tensor: Tensor, skipped: int) -> list[int] | None:
    """Return the index of an element of a tensor in one piece; None if no index has this offset.

    skipped: elements from the first element of the tensor.
    """
    index = [0] * len(tensor.shape)
    # The largest stride first: elements of a box do not overlap.
    for dim in sorted(range(len(index)), key=lambda dim: -tensor.strides[dim]):
        stride = tensor.strides[dim]
        if tensor.shape[dim] > 1 and stride:
            index[dim] = min(skipped // stride, tensor.shape[dim] - 1)
            skipped -= index[dim] * stride

    return None if skipped else index


def list_shards(tensor: Tensor) -> Sequence[Shard]:
    """Return the boxes of a tensor; a single box for a tensor in one piece, no box for a tensor without elements."""
    if not tensor.numel:
        return ()

    return tensor.shards or (Shard(replace(tensor, sharding=None), (0,) * len(tensor.shape)),)


def _restride(tensor: Tensor, skipped: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a part of a tensor in one piece. skipped: elements before its first element."""
    if (skipped, shape, strides) == (0, tensor.shape, tensor.strides):
        return tensor

    offset = tensor.offset + skipped * DTYPES[tensor.dtype].size
    # Checksums and digests are of the whole tensor, in its own order.
    return replace(tensor, shape=shape, strides=strides, offset=offset, crc32=None, same=b"")


def _from_shards(tensor: Tensor, shape: tuple[int, ...], boxes: Iterable[Shard]) -> Tensor:
    """Return a tensor with the name and dtype of another one. boxes: cover the shape."""
    parts = tuple(boxes)
    if len(parts) == 1 and parts[0].tensor.shape == shape:
        return replace(parts[0].tensor, name=tensor.name)

    first = parts[0].tensor.path if parts else tensor.path
    data = None if parts else b""
    return Tensor(tensor.name, tensor.dtype, shape, contiguous_strides(shape), first, 0, data=data, shards=parts)
