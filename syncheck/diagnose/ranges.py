"""Ranges of indices of one dimension of a tensor: rows, columns, elements, or indices of a dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.measures import parameters_of
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.records import TensorDiff


class Ranges(Sentence):
    """Ranges of indices, and single indices."""

    ROWS = "rows {first}-{last}"
    ROW = "row {first}"
    COLUMNS = "columns {first}-{last}"
    COLUMN = "column {first}"
    ELEMENTS = "elements {first}-{last}"
    INDICES = "indices {first}-{last} of dimension {dim}"
    INDEX = "index {first} of dimension {dim}"


# The sentences about several indices and a single index of a tensor, by its number of dimensions and the dimension.
_RANGES = {
    (1, 0): (Ranges.ELEMENTS, Ranges.ELEMENTS),
    (2, 0): (Ranges.ROWS, Ranges.ROW),
    (2, 1): (Ranges.COLUMNS, Ranges.COLUMN),
}


def list_ranges(diff: TensorDiff) -> tuple[Message, ...]:
    """Return the ranges of a relation with the parameters `dim` and `runs`: first indices and lengths in turn."""
    parameters = parameters_of(diff)
    dim, runs = parameters["dim"], parameters["runs"]
    several, single = _RANGES.get((len(diff.shape), dim), (Ranges.INDICES, Ranges.INDEX))
    ranges = []
    for first, length in zip(runs[::2], runs[1::2], strict=True):
        sentence = single if length == 1 else several
        ranges.append(sentence(first=first, last=first + length - 1, dim=dim))
    return tuple(ranges)
