"""Do the chunks of a tensor cover it, each element once?"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Span = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and size, by dimension."""

# Chunks of a mesh of ranks form a grid and need a few steps each; what is built to need the square of that is refused.
_STEPS = 1_000_000
_STEPS_PER_CHUNK = 64


def fault(shape: Sequence[int], spans: Sequence[Span]) -> str:
    """Say where chunks leave a gap, overlap, or reach out of a tensor; empty if they cover it exactly.

    spans: none of them empty.
    """
    if 0 in shape:
        return "chunks of an empty tensor" if spans else ""
    for start, size in spans:
        if any(at + length > most for at, length, most in zip(start, size, shape, strict=True)):
            return f"the chunk of size {list(size)} at {list(start)} reaches out of it"
    start, most = max(Counter(start for start, _ in spans).items(), key=lambda item: item[1], default=((), 0))
    if most > 1:  # quickly, whatever their number: a pickle can list one chunk a million times
        return f"{most} chunks hold element {list(start)}"
    left = _STEPS + _STEPS_PER_CHUNK * len(spans)
    waiting: list[tuple[tuple[int, ...], Sequence[Span]]] = [((), spans)]
    while waiting:
        # The chunks that hold the elements whose first indices are `at`.
        at, here = waiting.pop()
        if len(at) == len(shape):
            if len(here) != 1:
                return f"{len(here) or 'no'} chunks hold element {list(at)}"
            continue
        for low, inside in _slabs(here, len(at), shape[len(at)]):
            left -= len(inside) + 1
            if left < 0:
                return f"{len(spans)} chunks that cut one another into too many pieces to check"
            waiting.append(((*at, low), inside))
    return ""


def _slabs(spans: Sequence[Span], axis: int, length: int) -> Iterator[tuple[int, list[Span]]]:
    """Cut a dimension wherever a chunk begins or ends: where each slab begins, and the chunks that cross it."""
    edges = sorted({0, length, *(e for start, size in spans for e in (start[axis], start[axis] + size[axis]))})
    ordered = sorted(spans, key=lambda span: span[0][axis])
    crossing: list[Span] = []
    coming = 0
    for low, _ in itertools.pairwise(edges):
        crossing = [span for span in crossing if span[0][axis] + span[1][axis] > low]
        while coming < len(ordered) and ordered[coming][0][axis] == low:
            crossing.append(ordered[coming])
            coming += 1
        yield low, list(crossing)
