"""The check of chunks equals a count of the chunks of every element."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from support.strategies import EXAMPLES, for_all

from syncheck.readers.dcp.index import find_fault

ROWS = [((0, 0), (2, 3)), ((2, 0), (1, 3))]


@pytest.mark.parametrize(
    ("shape", "spans", "wrong"),
    [
        ((3, 3), ROWS, ""),
        ((3, 3), ROWS[:1], "no chunks contain element [2, 0]"),
        ((4, 3), ROWS, "no chunks contain element [3, 0]"),
        ((3, 3), [*ROWS, ((1, 1), (1, 1))], "2 chunks contain element [1, 1]"),
        ((3, 3), [*ROWS, ROWS[0]], "2 chunks contain element"),
        ((3, 2), ROWS, "the chunk of size [2, 3] at [0, 0] extends beyond the tensor"),
        ((3, 3), [], "no chunks contain element [0, 0]"),
        ((), [((), ())], ""),
        ((), [], "no chunks contain element []"),
        ((0, 3), [], ""),
        # A pinwheel: no cut goes through all of it.
        ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))], ""),
    ],
)
def test_gaps_and_overlaps_are_named(shape: Any, spans: Any, wrong: str) -> None:
    """A complete cover without overlaps passes; a gap or overlap is reported with its first element."""
    result = find_fault(shape, spans)
    assert result.startswith(wrong) if wrong else result == ""


@EXAMPLES
def test_result_equals_a_count_of_every_element(examples: int) -> None:
    """For random boxes, the result equals a count of the boxes of each element."""

    def check(case: Any) -> None:
        shape, corners = case
        spans = []
        for corner in corners:
            pairs = [(min(a, n - 1), min(b, n - 1)) for (a, b), n in zip(corner, shape, strict=False)]
            spans.append((tuple(min(p) for p in pairs), tuple(abs(a - b) + 1 for a, b in pairs)))
        contents = np.zeros(shape, int)
        for start, size in spans:
            contents[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
        assert (find_fault(shape, spans) == "") == bool((contents == 1).all())

    edges = st.tuples(st.integers(0, 2), st.integers(0, 2))
    corners = st.lists(st.tuples(edges, edges), max_size=4)
    for_all(st.tuples(st.tuples(st.integers(1, 3), st.integers(1, 3)), corners), check, examples)


def test_many_chunks_take_linear_time() -> None:
    """A grid of 64 x 64 chunks is checked quickly, and constructions with quadratic time are refused."""
    began = time.perf_counter()
    assert find_fault((640, 640), [((10 * i, 10 * j), (10, 10)) for i, j in product(range(64), range(64))]) == ""
    stairs = [((i, 0), (20_000 - i, 1)) for i in range(20_000)]
    assert "too many boxes" in find_fault((20_000, 20_000), stairs)
    assert time.perf_counter() - began < 20
