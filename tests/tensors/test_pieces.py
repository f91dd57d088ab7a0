"""Tensors in pieces: any range of elements, for any geometry of pieces, equals numpy's range of the whole."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support.listings import list_fields, measure_width
from support.strategies import EXAMPLES, for_all

from syncheck.snapshots import Shard, Tensor
from syncheck.tensors import blocks, pieces
from syncheck.tensors.blocks import Files, ranges
from syncheck.tensors.clustering import cluster_replicas

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("uint8", "float16", "int32", "complex128")


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """Draw a shape and boxes that cover the shape. Each cut splits one box in two."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    boxes = [tuple(slice(0, length) for length in shape)]
    for _ in range(draw(st.integers(0, 6))):
        position = draw(st.integers(0, len(boxes) - 1))
        wide = [i for i, span in enumerate(boxes[position]) if span.stop - span.start > 1]
        if wide:
            axis, box = draw(st.sampled_from(wide)), boxes.pop(position)
            middle = draw(st.integers(box[axis].start + 1, box[axis].stop - 1))
            halves = slice(box[axis].start, middle), slice(middle, box[axis].stop)
            boxes += [(*box[:axis], half, *box[axis + 1 :]) for half in halves]
    return shape, draw(st.permutations(boxes))


def make_array(shape: tuple[int, ...], dtype: str) -> Any:
    """Return an array of consecutive numbers modulo 251."""
    return (np.arange(math.prod(shape)) % 251).astype(dtype).reshape(shape)


def make_sharded(array: Any, boxes: list[tuple[slice, ...]], fortran: bool = False) -> Tensor:
    """Return the array as a tensor in shards. fortran: store each shard in Fortran order."""
    parts = []
    for box in boxes:
        piece = np.array(array[box], order="F" if fortran else "C").reshape(array[box].shape)
        strides = tuple(stride // array.itemsize for stride in piece.strides)
        tensor = Tensor("w", str(array.dtype), piece.shape, strides, "", 0, data=piece.tobytes("A"))
        parts.append(Shard(tensor, tuple(list_fields(box, "start"))))
    return Tensor("w", str(array.dtype), array.shape, (), "", 0, shards=tuple(parts))


@EXAMPLES
def test_any_range_of_any_geometry_equals_the_whole(examples: int) -> None:
    """Any range assembled from pieces has the bytes of the same range of the whole array."""

    def check(case: Any) -> None:
        (shape, boxes), dtype, fortran, start, count = case
        array = make_array(shape, dtype)
        start %= array.size
        count = min(count, array.size - start)
        with Files() as files:
            data = files.read(make_sharded(array, boxes, fortran), start, count, slot=0)
        assert bytes(data) == array.reshape(-1)[start : start + count].tobytes()

    numbers = st.integers(0, 6**4)
    for_all(st.tuples(cuts(), st.sampled_from(DTYPES), st.booleans(), numbers, numbers), check, examples)


@EXAMPLES
def test_reads_add_up_to_the_range(examples: int) -> None:
    """The reads from the pieces add up to the length of the range, so no element is read without need."""

    def check(case: Any) -> None:
        (shape, boxes), start, count = case
        tensor = make_sharded(make_array(shape, "uint8"), boxes)
        start %= tensor.numel
        count = min(count, tensor.numel - start)
        requested = []

        def fetch(part: Tensor, at: int, length: int) -> bytes:
            requested.append(length)
            assert at + length <= part.numel
            return bytes(length)

        assert len(pieces.assemble(tensor, start, count, fetch)) == count
        assert sum(requested) == count

    for_all(st.tuples(cuts(), st.integers(0, 6**4), st.integers(0, 6**4)), check, examples)


@EXAMPLES
def test_boxes_list_the_range_in_order(examples: int) -> None:
    """A range is split into few boxes, which list the elements of the range once and in order."""

    def check(case: Any) -> None:
        shape, start, count = case
        array = np.arange(math.prod(shape)).reshape(shape)
        start %= array.size
        count = min(count, array.size - start)
        boxes = list(pieces.split_into_boxes(shape, start, count))
        elements = chain.from_iterable(array[box].flat for box in boxes)
        assert list(elements) == list(range(start, start + count))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)

    shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
    for_all(st.tuples(shapes, st.integers(0, 6**4), st.integers(0, 6**4)), check, examples)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("flipped", [False, True])
def test_pieces_equal_a_whole_tensor(tmp_path: Path, axis: int, flipped: bool) -> None:
    """A tensor split by rows or columns across files equals the whole tensor, and one changed element is found."""
    array = np.random.default_rng(0).standard_normal((700, 1501)).astype(np.float32)
    (tmp_path / "whole").write_bytes(array.tobytes())
    first = Tensor("w", "float32", array.shape, (1501, 1), str(tmp_path / "whole"), 0)
    if flipped:
        array[650, 1400] += 1
    parts, position = [], 0
    for i, piece in enumerate(np.array_split(array, 3, axis)):
        (tmp_path / f"part{i}").write_bytes(b"?" * 5 + piece.tobytes())
        start = (position, 0) if axis == 0 else (0, position)
        tensor = Tensor("w", "float32", piece.shape, (piece.shape[1], 1), str(tmp_path / f"part{i}"), 5)
        parts.append(Shard(tensor, start))
        position += piece.shape[axis]
    many = Tensor("w", "float32", array.shape, (1501, 1), "", 0, shards=tuple(parts))
    with Files() as files:
        assert cluster_replicas([first, many], files) == (((0,), (1,)) if flipped else ((0, 1),))


def test_no_read_exceeds_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor in column shards is read in ranges of at most one block."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 12)
    array = make_array((1000, 64), "float32")
    tensor = make_sharded(array, [(slice(0, 1000), slice(0, 33)), (slice(0, 1000), slice(33, 64))])
    with Files() as files:
        data = [files.read(tensor, start, count, slot=0) for start, count in ranges([tensor])]
    assert b"".join(map(bytes, data)) == array.tobytes()
    assert measure_width(data) <= 1 << 12


def test_empty_range_has_no_bytes() -> None:
    """An empty range has no bytes, even if the tensor needs a conversion and its file does not exist."""
    tensor = Tensor("w", "complex64", (3, 0), (1, 1), "/nowhere", 0, lazy="conj")
    with Files() as files:
        assert [bytes(files.read(tensor, start, count, slot=0)) for start, count in ranges([tensor])] in ([], [b""])
        assert bytes(files.read(tensor, 0, 0, slot=0)) == b""
