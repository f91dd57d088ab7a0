"""Views of tensors: their elements in another shape, another order, or together with other tensors.

The bytes stay where they are: a view is a tensor in boxes, each a strided part of a file. Names of operations and of
their parameters are those of torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from syncheck.frozen import replace
from syncheck.layout.boxes import assemble, locate_box
from syncheck.snapshots import Shard, contiguous_strides, ravel_index
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.pieces import split_into_boxes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.snapshots import Tensor


def unflatten(tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the view with dimension `dim` divided into dimensions of these sizes, whose product is its length."""
    if math.prod(sizes) != tensor.shape[dim]:
        raise ValueError(f"{list(sizes)} are no parts of {tensor.shape[dim]}")

    shards = []
    for shard in list_shards(tensor):
        local = shard.tensor
        first = shard.start[dim]
        stride = local.strides[dim]
        inner_strides = [stride * inner_stride for inner_stride in contiguous_strides(sizes)]
        strides = _replace_dims(local.strides, dim, 1, inner_strides)
        for spans in split_into_boxes(sizes, first, local.shape[dim]):
            start, size = locate_box(spans)
            skipped = stride * (ravel_index(start, sizes) - first)
            shape = _replace_dims(local.shape, dim, 1, size)
            part = _restride(
                local,
                skipped=skipped,
                shape=shape,
                strides=strides,
            )
            shards.append(Shard(part, _replace_dims(shard.start, dim, 1, start)))

    full_shape = _replace_dims(tensor.shape, dim, 1, sizes)
    return _from_shards(tensor, full_shape, shards)


def permute(tensor: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the view with the dimensions in this order."""

    def order(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in dims)

    shards = []
    for shard in list_shards(tensor):
        local = shard.tensor
        part = _restride(
            local,
            skipped=0,
            shape=order(local.shape),
            strides=order(local.strides),
        )
        shards.append(Shard(part, order(shard.start)))

    return _from_shards(tensor, order(tensor.shape), shards)


def narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return the view of `length` indices from `start` on, in dimension `dim`."""
    shards = []
    for shard in list_shards(tensor):
        local = shard.tensor
        first = shard.start[dim]
        # Only the part of the box within the range remains.
        low = max(start, first)
        high = min(start + length, first + local.shape[dim])
        if low >= high:
            continue

        skipped = (low - first) * local.strides[dim]
        shape = _replace_dims(local.shape, dim, 1, [high - low])
        part = _restride(
            local,
            skipped=skipped,
            shape=shape,
            strides=local.strides,
        )
        shards.append(Shard(part, _replace_dims(shard.start, dim, 1, [low - start])))

    full_shape = _replace_dims(tensor.shape, dim, 1, [length])
    return _from_shards(tensor, full_shape, shards)


def flatten(tensor: Tensor, dim: int) -> Tensor:
    """Return the view with dimensions `dim` and `dim + 1` as one dimension."""
    outer_length, inner_length = tensor.shape[dim : dim + 2]
    shards: list[Shard] = []
    for shard in list_shards(tensor):
        local = shard.tensor
        rows, row_size = local.shape[dim : dim + 2]
        outer_stride, stride = local.strides[dim : dim + 2]
        # With one element in each row, the next element is in the next row.
        if row_size == 1 and rows > 1:
            stride = outer_stride

        # Indices of a dimension are consecutive in the result if the box has all inner indices, or one outer index.
        has_whole_rows = row_size == inner_length and outer_stride == row_size * stride
        if has_whole_rows:
            row_size *= rows
            rows = 1

        shape = _replace_dims(local.shape, dim, 2, [row_size])
        strides = _replace_dims(local.strides, dim, 2, [stride])
        first_row, first_column = shard.start[dim : dim + 2]
        for row in range(rows):
            start = (first_row + row) * inner_length + first_column
            part = _restride(
                local,
                skipped=row * outer_stride,
                shape=shape,
                strides=strides,
            )
            shards.append(Shard(part, _replace_dims(shard.start, dim, 2, [start])))

    full_shape = _replace_dims(tensor.shape, dim, 2, [outer_length * inner_length])
    return _from_shards(tensor, full_shape, shards)


def unstack(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor at each index of dimension 0, without this dimension."""
    for index in range(tensor.shape[0]):
        shards = []
        for shard in list_shards(narrow(tensor, 0, index, 1)):
            row = shard.tensor
            part = _restride(
                row,
                skipped=0,
                shape=row.shape[1:],
                strides=row.strides[1:],
            )
            shards.append(Shard(part, shard.start[1:]))

        yield _from_shards(tensor, tensor.shape[1:], shards)


def find_element(tensor: Tensor, view: Tensor, index: Sequence[int]) -> tuple[int, ...] | None:
    """Return the index in a tensor of an element of a view of it; None if its strides do not show it."""
    shard = _find_shard(view, index)
    if shard is None:
        return None

    offset = shard.tensor.offset
    for number, start, stride in zip(index, shard.start, shard.tensor.strides, strict=True):
        offset += DTYPES[tensor.dtype].size * (number - start) * stride

    for candidate in list_shards(tensor):
        # Bytes in memory have no path.
        is_same_file = candidate.tensor.path == shard.tensor.path and candidate.tensor.data is shard.tensor.data
        position = _find_index(candidate.tensor, offset)
        if is_same_file and position is not None:
            return tuple(start + number for start, number in zip(candidate.start, position, strict=True))

    return None


def _find_shard(tensor: Tensor, index: Sequence[int]) -> Shard | None:
    """Return the shard with an element of a tensor."""
    for shard in list_shards(tensor):
        spans = zip(index, shard.start, shard.tensor.shape, strict=True)
        if all(start <= number < start + length for number, start, length in spans):
            return shard

    return None


def _find_index(tensor: Tensor, offset: int) -> list[int] | None:
    """Return the index of the element of a tensor in one piece at an offset in its file; None without an element."""
    skipped, misalignment = divmod(offset - tensor.offset, DTYPES[tensor.dtype].size)
    if skipped < 0 or misalignment:
        return None

    index = [0] * len(tensor.shape)
    # The largest stride first: elements of a box do not overlap.
    for dim in sorted(range(len(index)), key=tensor.strides.__getitem__, reverse=True):
        stride = tensor.strides[dim]
        # All elements of an expanded dimension are one element.
        if stride:
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
    return replace(
        tensor,
        shape=shape,
        strides=strides,
        offset=offset,
        crc32=None,
        same=b"",
    )


def _replace_dims(values: Sequence[int], dim: int, count: int, new_values: Sequence[int]) -> tuple[int, ...]:
    """Return the values of all dimensions, with new values for `count` dimensions from `dim` on."""
    return (*values[:dim], *new_values, *values[dim + count :])


def _from_shards(tensor: Tensor, shape: tuple[int, ...], shards: Sequence[Shard]) -> Tensor:
    """Return a tensor with the name and dtype of another one. shards: cover the shape."""
    return assemble(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=shape,
        shards=shards,
        path=tensor.path,
    )
