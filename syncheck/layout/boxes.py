"""Boxes of a tensor: find the boxes that a rank holds, and check that all boxes together cover the tensor."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import MalformedFile
from syncheck.frozen import replace
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
    length = count_indices(runs)
    rows = -(-length // count)
    return cut_runs(runs, min(number * rows, length), min((number + 1) * rows, length))


def count_indices(runs: Runs) -> int:
    """Return the number of indices in the runs of a dimension."""
    return sum(size for _, size in runs)


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
    located_runs = []
    box_count = 1
    for runs_of_dim in runs:
        located_runs.append(_locate_runs(runs_of_dim))
        box_count *= len(runs_of_dim)

    if box_count > MOST_BOXES:
        raise ValueError(f"more than {MOST_BOXES} boxes")

    return [_cut_box(local, box) for box in itertools.product(*located_runs)]


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


def _cut_box(local: Tensor, box: Sequence[_LocatedRun]) -> Shard:
    """Return a box of a rank's tensor as a view of it. box: a run of each dimension."""
    skipped = 0
    start = []
    shape = []
    for run, stride in zip(box, local.strides, strict=True):
        skipped += run.local_start * stride
        start.append(run.start)
        shape.append(run.size)

    part = view(
        local,
        skipped=skipped,
        shape=tuple(shape),
        strides=local.strides,
    )
    return Shard(part, tuple(start))


def cut_flat_tensor(flat: Tensor, position: int, shape: tuple[int, ...], start: int, count: int) -> list[Shard]:
    """Return boxes of a tensor of this shape: its elements `start` to `start + count`, in C order.

    flat: contiguous elements, which hold these elements from `position` on.
    """
    shards = []
    for spans in split_into_boxes(shape, start, count):
        first, size = locate_box(spans)
        part = view(
            flat,
            skipped=position,
            shape=size,
            strides=contiguous_strides(size),
        )
        shards.append(Shard(part, first))
        position += math.prod(size)

    return shards


def locate_box(spans: Sequence[slice]) -> Box:
    """Return the start and the size of a box. spans: its indices in each dimension."""
    start: list[int] = []
    size: list[int] = []
    for span in spans:
        start.append(span.start)
        size.append(span.stop - span.start)

    return tuple(start), tuple(size)


def view(tensor: Tensor, skipped: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return a part of a tensor. skipped: elements before its first element."""
    if tensor.shape == shape:
        return replace(tensor, sharding=None)

    offset = tensor.offset + skipped * DTYPES[tensor.dtype].size
    # Checksums and digests are of the whole tensor.
    return replace(
        tensor,
        shape=shape,
        strides=strides,
        offset=offset,
        sharding=None,
        crc32=None,
        digest=None,
        same=b"",
    )


def is_in_file(tensor: Tensor) -> bool:
    """Whether the bytes of a tensor are in its file: not in memory, and not only in a digest."""
    return tensor.data is None and tensor.digest is None


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

    covering = [by_box[box] for box in sorted(by_box)]
    return assemble(
        name=name,
        dtype=dtype,
        shape=shape,
        shards=covering,
        path=path,
    )


def assemble(name: str, dtype: str, shape: tuple[int, ...], shards: Sequence[Shard], path: str) -> Tensor:
    """Return the tensor of boxes that cover its shape. path: of a tensor without boxes."""
    # A tensor without elements has no boxes, and its data is empty.
    if not shards:
        return Tensor(
            name=name,
            dtype=dtype,
            shape=shape,
            strides=contiguous_strides(shape),
            path=path,
            offset=0,
            data=b"",
        )

    first = shards[0].tensor
    if len(shards) == 1:
        return replace(first, name=name, sharding=None)

    return Tensor(
        name=name,
        dtype=dtype,
        shape=shape,
        strides=contiguous_strides(shape),
        path=first.path,
        offset=0,
        shards=tuple(shards),
    )


def find_fault(shape: Sequence[int], spans: Sequence[Box]) -> str:
    """Describe a gap, overlap or excess of chunks in a tensor; return "" if they cover the tensor exactly.

    spans: non-empty chunks.
    """
    if 0 in shape:
        return "chunks of an empty tensor" if spans else ""

    for start, size in spans:
        extents = zip(start, size, shape, strict=True)
        if any(first + length > most for first, length, most in extents):
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
