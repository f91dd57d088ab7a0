"""Boxes of a tensor: find the boxes that a rank holds, and check that all boxes together cover the tensor."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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


def chunk_runs(runs: Runs, count: int, number: int) -> Runs:
    """Return chunk `number` of `count` of the concatenated runs, as `torch.chunk` splits a dimension.

    The last chunks are shorter or empty.
    """
    length = sum(size for _, size in runs)
    rows = -(-length // count)
    return cut_runs(runs, min(number * rows, length), min((number + 1) * rows, length))


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

    shards = []
    for box in itertools.product(*map(_locate_runs, runs)):
        skipped = sum(run.local_start * stride for run, stride in zip(box, local.strides, strict=True))
        shape = tuple(run.size for run in box)
        start = tuple(run.start for run in box)
        shards.append(Shard(view(local, skipped, shape, local.strides), start))

    return shards


class _LocatedRun(NamedTuple):
    """A range of indices of one dimension. local_start: of its first index in the rank's tensor."""

    start: int
    size: int
    local_start: int


def _locate_runs(runs: Runs) -> list[_LocatedRun]:
    """Return the runs of a dimension, which a rank's tensor holds one after the other."""
    located_runs: list[_LocatedRun] = []
    local_start = 0
    for start, size in runs:
        located_runs.append(_LocatedRun(start, size, local_start))
        local_start += size

    return located_runs


def cut_flat_tensor(flat: Tensor, position: int, shape: tuple[int, ...], start: int, count: int) -> list[Shard]:
    """Return boxes of a tensor of this shape: its elements `start` to `start + count`, in C order.

    flat: contiguous elements, which hold these elements from `position` on.
    """
    shards = []
    for box in split_into_boxes(shape, start, count):
        size = tuple(span.stop - span.start for span in box)
        first = tuple(span.start for span in box)
        shards.append(Shard(view(flat, position, size, contiguous_strides(size)), first))
        position += math.prod(size)

    return shards


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
    by_box: dict[Box, Shard] = {}
    for shard in shards:
        if shard.tensor.numel:
            by_box.setdefault((shard.start, shard.tensor.shape), shard)

    fault = find_fault(shape, list(by_box))
    if fault:
        raise MalformedFile(
            path,
            place=f"tensor {brief(name)}",
            found=fault,
            needed=f"parts that cover {list(shape)} once",
            next_step="pass the files of all ranks of one step; if they are complete, save or copy them again",
        )

    covering = tuple(shard for _, shard in sorted(by_box.items()))
    # A tensor without elements has no boxes, and its data is empty.
    if not covering:
        return Tensor(name, dtype, shape, contiguous_strides(shape), path, 0, data=b"")

    first = covering[0].tensor
    if len(covering) == 1:
        return replace(first, name=name, sharding=None)

    return Tensor(name, dtype, shape, contiguous_strides(shape), first.path, 0, shards=covering)


def find_fault(shape: Sequence[int], spans: Sequence[Box]) -> str:
    """Describe a gap, overlap or excess of chunks in a tensor; return "" if they cover the tensor exactly.

    spans: non-empty chunks.
    """
    if 0 in shape:
        return "chunks of an empty tensor" if spans else ""

    for start, size in spans:
        ends = map(operator.add, start, size)
        if any(end > most for end, most in zip(ends, shape, strict=True)):
            return f"the chunk of size {list(size)} at {list(start)} extends beyond the tensor"

    # A fast test, because a pickle can list one chunk a million times.
    starts = Counter(start for start, _ in spans)
    for start, count in starts.most_common(1):
        if count > 1:
            return f"{count} chunks contain element {list(start)}"

    return _find_uneven_cover(shape, spans)


def _find_uneven_cover(shape: Sequence[int], spans: Sequence[Box]) -> str:
    """Describe an element that no chunk or several chunks contain; return "" without such an element.

    spans: non-empty chunks within the tensor.
    """
    budget = _STEPS + _STEPS_PER_CHUNK * len(spans)
    # The first indices of elements, and the chunks with such elements.
    slabs: list[tuple[tuple[int, ...], Sequence[Box]]] = [((), spans)]
    while slabs:
        index, chunks = slabs.pop()
        if len(index) < len(shape):
            for low, crossing_chunks in _cut_slabs(chunks, len(index), shape[len(index)]):
                budget -= len(crossing_chunks) + 1
                if budget < 0:
                    return f"{len(spans)} chunks overlap in too many boxes to check"

                slabs.append(((*index, low), crossing_chunks))
        elif len(chunks) != 1:
            return f"{len(chunks) or 'no'} chunks contain element {list(index)}"

    return ""


def _cut_slabs(spans: Sequence[Box], axis: int, length: int) -> Iterator[tuple[int, list[Box]]]:
    """Cut a dimension at every start and end of a chunk. Yield the start of each slab and the chunks that cross it."""
    edges = {0, length}
    for start, size in spans:
        edges.update((start[axis], start[axis] + size[axis]))

    ordered = sorted(spans, key=lambda span: span[0][axis])
    crossing: list[Box] = []
    coming = 0
    for low, _ in itertools.pairwise(sorted(edges)):
        crossing = [span for span in crossing if span[0][axis] + span[1][axis] > low]
        while coming < len(ordered) and ordered[coming][0][axis] == low:
            crossing.append(ordered[coming])
            coming += 1

        yield low, list(crossing)
