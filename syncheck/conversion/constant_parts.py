"""Find rows, columns or other indices of a tensor with one value in one model only: parts that were not written."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.rows import find_runs
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.tensors.blocks import BLOCK
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements of each row that are compared first: nearly all rows of weights begin with different elements.
_BEGIN = 3
# Fewer equal elements than this, in a tensor of one dimension, are a coincidence.
_FEWEST_ELEMENTS = 4
# Runs of indices that are stated; more of them are no block.
_MOST_RUNS = 4
# Runs of rows with equal beginnings that are read.
_MOST_CANDIDATES = 16


class _Rows(NamedTuple):
    """The rows of one tensor."""

    are_constant: Any
    """For each row, whether all of its elements are equal."""
    values: Any
    """The first element of each row, as float64."""


def relate_constant_part(name: str, models: Models) -> dict[str, Relation]:
    """Find the indices of one dimension whose elements have one value in one model, and not in the other model."""
    a, b = models.a[name], models.b[name]
    for dim, length in enumerate(b.shape):
        # A dimension with one index has no parts.
        if length > 1:
            rows_a = views.permute(a, _move_first(dim, a))
            rows_b = views.permute(b, _move_first(dim, b))
            parameters = _find_part(rows_a, rows_b, models.files)
            if parameters is not None:
                return {name: Relation(RelationKind.CONSTANT_PART, {**parameters, "dim": dim})}
    return {}


def _move_first(dim: int, tensor: Tensor) -> list[int]:
    """Return all dimensions, this one first."""
    further_dims = [*range(len(tensor.shape))]
    further_dims.remove(dim)
    return [dim, *further_dims]


def _find_part(a: Tensor, b: Tensor, files: Files) -> Mapping[str, Any] | None:
    """Return the parameters of rows that are constant in one model only; None if there are none, or no few runs."""
    rows_of_sides = {"B": _scan(b, files), "A": _scan(a, files)}
    # Elements of a vector are equal by chance.
    fewest_rows = _FEWEST_ELEMENTS if b.numel == b.shape[0] else 1
    for side, other in (("B", "A"), ("A", "B")):
        indices, value = _select_constant(rows_of_sides[side], rows_of_sides[other])
        runs = find_runs(indices, _MOST_RUNS)
        if 0 < len(runs) <= _MOST_RUNS and len(indices) >= fewest_rows * len(runs):
            return {"side": side, "runs": tuple(chain.from_iterable(runs)), "value": value}
    return None


def _scan(rows: Tensor, files: Files) -> _Rows:
    """Return which rows of a tensor are constant; none if the beginnings of many rows show no few runs."""
    beginnings = rows
    if len(rows.shape) > 1 and rows.shape[-1] > _BEGIN:
        beginnings = views.narrow(rows, len(rows.shape) - 1, 0, _BEGIN)
    scanned = _read_rows(beginnings, files)
    candidates = find_runs(scanned.are_constant.nonzero()[0].tolist(), _MOST_CANDIDATES)
    # Masks and other tensors with few different values begin with equal elements by chance.
    if len(candidates) > _MOST_CANDIDATES:
        scanned.are_constant[:] = False
        return scanned
    for first, length in candidates:
        read = _read_rows(views.narrow(rows, 0, first, length), files)
        scanned.are_constant[first : first + length] = read.are_constant
    return scanned


def _read_rows(rows: Tensor, files: Files) -> _Rows:
    """Read a tensor in blocks of whole rows, or in parts of a row that is longer than a block."""
    import numpy as np

    dtype = DTYPES[rows.dtype]
    count = rows.shape[0]
    length = rows.numel // count
    most = max(1, BLOCK // dtype.size)
    rows_at_once = max(1, most // length)
    elements_at_once = min(length, most)
    are_constant = np.ones(count, bool)
    first_values = np.zeros(count, dtype.dtype())
    for row in range(0, count, rows_at_once):
        last = min(count, row + rows_at_once)
        for start in range(0, length, elements_at_once):
            elements = (last - row) * min(elements_at_once, length - start)
            data = bytes(files.read(rows, row * length + start, elements, 0))
            values = np.frombuffer(data, first_values.dtype).reshape(last - row, -1)
            if start == 0:
                first_values[row:last] = values[:, 0]
            # 0 equals -0, which a mask leaves; NaN equals nothing, and has its own statement.
            are_constant[row:last] &= (values == first_values[row:last, None]).all(1)
    return _Rows(are_constant, first_values.astype(np.float64))


def _select_constant(rows: _Rows, partner: _Rows) -> tuple[Any, float]:
    """Return the rows with the most frequent constant that the other model does not have there, and the constant.

    Without a constant row, the constant is 0.
    """
    import numpy as np

    is_same = partner.are_constant & (rows.values == partner.values)
    candidates = rows.are_constant & ~is_same
    # The sum changes -0 to 0.
    constants, positions = np.unique(rows.values + 0.0, return_inverse=True)
    counts = np.bincount(positions, weights=candidates)
    most_frequent = counts.argmax()
    indices = np.nonzero(candidates & (positions == most_frequent))[0].tolist()
    return indices, float(constants[most_frequent]) if indices else 0.0
