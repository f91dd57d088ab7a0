"""Views of tensors in one piece and in boxes have the elements that numpy computes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncheck.layout import views
from syncheck.snapshots import Shard, Tensor, contiguous_strides
from syncheck.tensors.blocks import Files

if TYPE_CHECKING:
    from collections.abc import Callable

Pair = tuple[Tensor, Any]


def in_memory(array: Any) -> Tensor:
    """Return a tensor with the elements of an array."""
    shape = array.shape
    return Tensor("w", "int32", shape, contiguous_strides(shape), "memory", 0, data=array.astype("<i4").tobytes())


def in_boxes(array: Any, cuts: tuple[int, ...]) -> Tensor:
    """Return a tensor that is cut at these rows."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(array)}), len(array)]
    zeros = (0,) * (array.ndim - 1)
    parts = tuple(Shard(in_memory(array[low:high]), (low, *zeros)) for low, high in itertools.pairwise(edges))
    complete = in_memory(array)
    return (
        complete
        if len(parts) == 1
        else Tensor("w", "int32", complete.shape, complete.strides, "memory", 0, shards=parts)
    )


def read(tensor: Tensor, start: int, count: int) -> list[int]:
    """Return elements of a tensor."""
    with Files() as files:
        return np.frombuffer(bytes(files.read(tensor, start, count, 0)), "<i4").tolist()


def unflatten(pair: Pair, draw: Callable[[Any], Any]) -> Pair:
    """Divide a dimension."""
    tensor, array = pair
    dim = draw(st.integers(0, array.ndim - 1))
    first = draw(st.sampled_from([n for n in range(1, array.shape[dim] + 1) if array.shape[dim] % n == 0]))
    sizes = (first, array.shape[dim] // first)
    return views.unflatten(tensor, dim, sizes), array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])


def permute(pair: Pair, draw: Callable[[Any], Any]) -> Pair:
    """Change the order of dimensions."""
    dims = draw(st.permutations(range(pair[1].ndim)))
    return views.permute(pair[0], dims), pair[1].transpose(dims)


def narrow(pair: Pair, draw: Callable[[Any], Any]) -> Pair:
    """Omit the first and last indices of a dimension."""
    tensor, array = pair
    dim = draw(st.integers(0, array.ndim - 1))
    start = draw(st.integers(0, array.shape[dim] - 1))
    length = draw(st.integers(1, array.shape[dim] - start))
    return views.narrow(tensor, dim, start, length), array.take(range(start, start + length), dim)


def flatten(pair: Pair, draw: Callable[[Any], Any]) -> Pair:
    """Join two neighbouring dimensions."""
    tensor, array = pair
    if array.ndim < 2:
        return pair
    dim = draw(st.integers(0, array.ndim - 2))
    shape = (*array.shape[:dim], array.shape[dim] * array.shape[dim + 1], *array.shape[dim + 2 :])
    return views.flatten(tensor, dim), array.reshape(shape)


def take_row(pair: Pair, draw: Callable[[Any], Any]) -> Pair:
    """Take one index of the first dimension."""
    tensor, array = pair
    if array.ndim < 2:
        return pair
    position = draw(st.integers(0, array.shape[0] - 1))
    return [*views.unstack(tensor)][position], array[position]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_views_have_the_elements_of_numpy(data: st.DataObject) -> None:
    """Any sequence of operations on a tensor in any boxes, read in any range."""
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    cuts = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    original = in_boxes(array, cuts)
    pair: Pair = original, array
    for step in data.draw(st.lists(st.sampled_from([unflatten, permute, narrow, flatten, take_row]), max_size=5)):
        pair = step(pair, data.draw)
    tensor, expected = pair
    assert tensor.shape == expected.shape
    start = data.draw(st.integers(0, expected.size - 1))
    count = data.draw(st.integers(1, expected.size - start))
    assert read(tensor, start, count) == expected.reshape(-1)[start : start + count].tolist()
    index = tuple(int(i) for i in np.unravel_index(start, expected.shape))
    if len(original.shards) < 2:  # the boxes of this test have separate memory at equal offsets
        result = views.find_element(original, tensor, index)
        assert result is not None
        assert array[result] == expected[index]


def test_views_of_nothing() -> None:
    """A tensor without elements has views without elements."""
    empty = in_memory(np.zeros((0, 4), np.int32))
    assert views.permute(empty, (1, 0)).shape == (4, 0)
    assert views.unflatten(empty, 1, (2, 2)).shape == (0, 2, 2)
    assert views.flatten(empty, 0).numel == 0


def test_other_shapes_are_refused() -> None:
    """Sizes that do not fit, and tensors with other lengths."""
    tensor = in_memory(np.zeros((2, 4), np.int32))
    with pytest.raises(ValueError, match="3"):
        views.unflatten(tensor, 1, (3, 2))
