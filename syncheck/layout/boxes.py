"""Boxes of a tensor: find the boxes that a rank holds, and check that all boxes together cover the tensor."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.errors import MalformedFile
from syncheck.snapshots import Shard, Tensor, contiguous_strides
from syncheck.tensors.dtypes import DTYPES
from syncheck.tensors.pieces import split_into_boxes
from syncheck.text import brief

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Ranges of indices of one dimension: (start, length).
Runs = tuple[tuple[int, int], ...]

# Limit of boxes that one rank holds of a tensor. FSDP and tensor parallelism together make one box; only strided shards
# of views have more.
MOST_BOXES = 64
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size, by dimension."""

# Chunks of a device mesh form a grid and need a few steps each; constructions that need quadratic time are refused.
_STEPS = 1_000_000
_STEPS_PER_CHUNK = 64


def chunk_runs(runs: Runs, count: int, at: int) -> Runs:
    """Return chunk number `at` of `count` of the concatenated runs, as `torch.chunk` splits a dimension.

    The last chunks are shorter or empty.
    """
    length = sum(size for _, size in runs)
    rows = -(-length // count)
    return cut_runs(runs, min(at * rows, length), min((at + 1) * rows, length))


def cut_runs(runs: Runs, low: int, high: int) -> Runs:
    """Return positions `low` to `high` of the concatenated runs."""
    cut = []
    begin = 0
    for start, size in runs:
        first, last = max(low - begin, 0), min(high - begin, size)
        if first < last:
            cut.append((start + first, last - first))
        begin += size
    return tuple(cut)


def cut_tensor(local: Tensor, runs: Sequence[Runs]) -> list[Shard]:
    """Return the boxes of a rank's tensor, as views of it. runs: for each dimension, the global indices of its rows.

    Raises ValueError for more than `MOST_BOXES` boxes.
    """
    if math.prod(map(len, runs)) > MOST_BOXES:
        raise ValueError(f"more than {MOST_BOXES} boxes")
    boxes = []
    begins = [list(itertools.accumulate((size for _, size in of_axis), initial=0)) for of_axis in runs]
    for numbers in itertools.product(*(range(len(of_axis)) for of_axis in runs)):
        start, shape = zip(*(of_axis[i] for of_axis, i in zip(runs, numbers, strict=True)), strict=True)
        first = [begin[i] for begin, i in zip(begins, numbers, strict=True)]
        skipped = sum(at * stride for at, stride in zip(first, local.strides, strict=True))
        boxes.append(Shard(view(local, skipped, shape, local.strides), start))
    return boxes


def cut_flat_tensor(flat: Tensor, at: int, shape: tuple[int, ...], start: int, count: int) -> list[Shard]:
    """Return boxes of a tensor of this shape: its elements `start` to `start + count`, in C order.

    flat: contiguous elements, which hold these elements from number `at` on.
    """
    boxes = []
    for box in split_into_boxes(shape, start, count):
        size = tuple(span.stop - span.start for span in box)
        boxes.append(Shard(view(flat, at, size, contiguous_strides(size)), tuple(span.start for span in box)))
        at += math.prod(size)
    return boxes


def view(tensor: Tensor, skipped: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a part of a tensor. skipped: elements before its first element."""
    if tensor.shape == shape:
        return replace(tensor, sharding=None)
    offset = tensor.offset + skipped * DTYPES[tensor.dtype].size
    # Checksums and digests are of the whole tensor.
    return replace(
        tensor, shape=shape, strides=strides, offset=offset, sharding=None, crc32=None, digest=None, same=b""
    )


def combine(name: str, dtype: str, shape: tuple[int, ...], shards: Iterable[Shard], path: str) -> Tensor:
    """Return the tensor that boxes cover. Equal boxes are copies, of which the first is used.

    path: of the checkpoint. Raises MalformedFile for holes, overlaps and boxes beyond the tensor.
    """
    boxes: dict[Box, Shard] = {}
    for shard in shards:
        if shard.tensor.numel:
            boxes.setdefault((shard.start, shard.tensor.shape), shard)
    parts = tuple(shard for _, shard in sorted(boxes.items()))
    fault = find_fault(shape, [*boxes])
    if fault:
        raise MalformedFile(
            path, place=f"tensor {brief(name)}", found=fault, needed=f"parts that cover {list(shape)} once",
            next_step="pass the files of all ranks of one step; if they are complete, save or copy them again",
        )  # fmt: skip
    if len(parts) == 1:
        return replace(parts[0].tensor, name=name, sharding=None)
    # A tensor without elements has no boxes, and its data is empty.
    first = parts[0].tensor.path if parts else path
    return Tensor(name, dtype, shape, contiguous_strides(shape), first, 0, data=None if parts else b"", shards=parts)


def find_fault(shape: Sequence[int], spans: Sequence[Box]) -> str:
    """Describe a gap, overlap or excess of chunks in a tensor; return "" if they cover the tensor exactly.

    spans: non-empty chunks.
    """
    if 0 in shape:
        return "chunks of an empty tensor" if spans else ""
    for start, size in spans:
        if any(at + length > most for at, length, most in zip(start, size, shape, strict=True)):
            return f"the chunk of size {list(size)} at {list(start)} extends beyond the tensor"
    start, most = max(Counter(start for start, _ in spans).items(), key=lambda item: item[1], default=((), 0))
    if most > 1:  # a fast test, because a pickle can list one chunk a million times
        return f"{most} chunks contain element {list(start)}"
    left = _STEPS + _STEPS_PER_CHUNK * len(spans)
    waiting: list[tuple[tuple[int, ...], Sequence[Box]]] = [((), spans)]
    while waiting:
        # The chunks with elements whose first indices are `at`.
        at, crossing_chunks = waiting.pop()
        if len(at) == len(shape):
            if len(crossing_chunks) != 1:
                return f"{len(crossing_chunks) or 'no'} chunks contain element {list(at)}"
            continue
        for low, crossing in _cut_slabs(crossing_chunks, len(at), shape[len(at)]):
            left -= len(crossing) + 1
            if left < 0:
                return f"{len(spans)} chunks overlap in too many boxes to check"
            waiting.append(((*at, low), crossing))
    return ""


def _cut_slabs(spans: Sequence[Box], axis: int, length: int) -> Iterator[tuple[int, list[Box]]]:
    """Cut a dimension at every start and end of a chunk. Yield the start of each slab and the chunks that cross it."""
    edges = sorted({0, length, *(e for start, size in spans for e in (start[axis], start[axis] + size[axis]))})
    ordered = sorted(spans, key=lambda span: span[0][axis])
    crossing: list[Box] = []
    coming = 0
    for low, _ in itertools.pairwise(edges):
        crossing = [span for span in crossing if span[0][axis] + span[1][axis] > low]
        while coming < len(ordered) and ordered[coming][0][axis] == low:
            crossing.append(ordered[coming])
            coming += 1
        yield low, list(crossing)
