"""Tensors in pieces: any range of elements, of pieces in any geometry, equals what numpy gives of the whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st
from strategies import EXAMPLES, for_all

from syncheck.kernel import blocks, pieces
from syncheck.kernel.blocks import Files, ranges
from syncheck.kernel.clustering import cluster_replicas
from syncheck.snapshots import Shard, Tensor

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("uint8", "float16", "int32", "complex128")


@st.composite
def cuts(draw: Any) -> tuple[tuple[int, ...], list[tuple[slice, ...]]]:
    """A shape, and boxes that cover it: cut in two again and again, each cut through one of the pieces only."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    found = [tuple(slice(0, length) for length in shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(found) - 1))
        wide = [i for i, span in enumerate(found[at]) if span.stop - span.start > 1]
        if wide:
            axis, box = draw(st.sampled_from(wide)), found.pop(at)
            middle = draw(st.integers(box[axis].start + 1, box[axis].stop - 1))
            halves = slice(box[axis].start, middle), slice(middle, box[axis].stop)
            found += [(*box[:axis], half, *box[axis + 1 :]) for half in halves]
    return shape, draw(st.permutations(found))


def whole(shape: tuple[int, ...], dtype: str) -> Any:
    """An array of which no two elements are equal."""
    return (np.arange(math.prod(shape)) % 251).astype(dtype).reshape(shape)


def stored(array: Any, boxes: list[tuple[slice, ...]], turned: bool = False) -> Tensor:
    """The array as a tensor in parts. turned: each part lies in the order of Fortran."""
    parts = []
    for box in boxes:
        piece = np.array(array[box], order="F" if turned else "C").reshape(array[box].shape)
        strides = tuple(stride // array.itemsize for stride in piece.strides)
        tensor = Tensor("w", str(array.dtype), piece.shape, strides, "", 0, data=piece.tobytes("A"))
        parts.append(Shard(tensor, tuple(span.start for span in box)))
    return Tensor("w", str(array.dtype), array.shape, (), "", 0, shards=tuple(parts))


@EXAMPLES
def test_any_range_of_any_geometry_equals_the_whole(examples: int) -> None:
    """A range that is put together from pieces has the bytes of the same range of the whole, whatever the cuts."""

    def check(case: Any) -> None:
        (shape, boxes), dtype, turned, start, count = case
        array = whole(shape, dtype)
        start %= array.size
        count = min(count, array.size - start)
        with Files() as files:
            found = files.read(stored(array, boxes, turned), start, count, slot=0)
        assert bytes(found) == array.reshape(-1)[start : start + count].tobytes()

    numbers = st.integers(0, 6**4)
    for_all(st.tuples(cuts(), st.sampled_from(DTYPES), st.booleans(), numbers, numbers), check, examples)


@EXAMPLES
def test_no_read_is_larger_than_the_range(examples: int) -> None:
    """What is asked of the pieces is disjoint and makes up the range: no row is read twice or for nothing."""

    def check(case: Any) -> None:
        (shape, boxes), start, count = case
        tensor = stored(whole(shape, "uint8"), boxes)
        start %= tensor.numel
        count = min(count, tensor.numel - start)
        asked = []

        def fetch(part: Tensor, at: int, length: int) -> bytes:
            asked.append(length)
            assert at + length <= part.numel
            return bytes(length)

        assert len(pieces.assemble(tensor, start, count, fetch)) == count
        assert sum(asked) == count

    for_all(st.tuples(cuts(), st.integers(0, 6**4), st.integers(0, 6**4)), check, examples)


@EXAMPLES
def test_boxes_are_the_range_in_its_order(examples: int) -> None:
    """Boxes, one after the other, list the elements of the range once and in order, and are few."""

    def check(case: Any) -> None:
        shape, start, count = case
        array = np.arange(math.prod(shape)).reshape(shape)
        start %= array.size
        count = min(count, array.size - start)
        boxes = list(pieces.split_into_boxes(shape, start, count))
        listed = [element for box in boxes for element in array[box].reshape(-1).tolist()]
        assert listed == list(range(start, start + count))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)

    shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)
    for_all(st.tuples(shapes, st.integers(0, 6**4), st.integers(0, 6**4)), check, examples)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("flipped", [False, True])
def test_pieces_compare_with_a_tensor_in_one_piece(tmp_path: Path, axis: int, flipped: bool) -> None:
    """Cut by rows or columns, in files, larger than a block: equal to the whole, and one flipped element is found."""
    array = np.random.default_rng(0).standard_normal((700, 1501)).astype(np.float32)
    (tmp_path / "whole").write_bytes(array.tobytes())
    one = Tensor("w", "float32", array.shape, (1501, 1), str(tmp_path / "whole"), 0)
    if flipped:
        array[650, 1400] += 1
    parts, at = [], 0
    for i, piece in enumerate(np.array_split(array, 3, axis)):
        (tmp_path / f"part{i}").write_bytes(b"?" * 5 + piece.tobytes())
        start = (at, 0) if axis == 0 else (0, at)
        tensor = Tensor("w", "float32", piece.shape, (piece.shape[1], 1), str(tmp_path / f"part{i}"), 5)
        parts.append(Shard(tensor, start))
        at += piece.shape[axis]
    many = Tensor("w", "float32", array.shape, (1501, 1), "", 0, shards=tuple(parts))
    with Files() as files:
        assert cluster_replicas([one, many], files) == (((0,), (1,)) if flipped else ((0, 1),))


def test_memory_is_a_block_whatever_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a large tensor are read a block of rows at a time: no read is larger than a block."""
    monkeypatch.setattr(blocks, "BLOCK", 1 << 12)
    array = whole((1000, 64), "float32")
    tensor = stored(array, [(slice(0, 1000), slice(0, 33)), (slice(0, 1000), slice(33, 64))])
    with Files() as files:
        found = [files.read(tensor, start, count, slot=0) for start, count in ranges([tensor])]
    assert b"".join(map(bytes, found)) == array.tobytes()
    assert max(map(len, found)) <= 1 << 12


def test_nothing_is_read_of_a_tensor_without_elements() -> None:
    """A range of no elements is no bytes, also of a tensor that has to be converted and lies in no file."""
    tensor = Tensor("w", "complex64", (3, 0), (1, 1), "/nowhere", 0, lazy="conj")
    with Files() as files:
        assert [bytes(files.read(tensor, start, count, slot=0)) for start, count in ranges([tensor])] in ([], [b""])
        assert bytes(files.read(tensor, 0, 0, slot=0)) == b""
