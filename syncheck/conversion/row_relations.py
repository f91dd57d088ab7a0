"""Find B among the rows of A: rows in another order, and rows that one of the models holds several times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.fused_parts import are_parts_of_one, has_rotary_rows
from syncheck.conversion.model_pairs import FEW, find_different_dim
from syncheck.conversion.rows import (
    MOST_ROWS,
    describe_copies,
    describe_heads,
    describe_order,
    describe_regular_copies,
    describe_shift,
    digest_rows,
    find_order,
    may_have_rows,
)
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor

# Limit of the channels whose order is listed.
_MOST_CHANNELS = 8
# Rows of the smallest head that models have, if no configuration states their number.
_LEAST_HEAD = 16


class _Digests(NamedTuple):
    """The digests of the rows of two tensors."""

    a: list[bytes]
    """Of the tensor of A, or of the shorter tensor."""
    b: list[bytes]
    """Of the tensor of B, or of the longer tensor."""

    @property
    def are_distinct(self) -> bool:
        """Whether most rows of A differ. Masks and other tensors with few different rows have equal rows by chance."""
        return 2 * len(set(self.a)) > len(self.a)


@dataclass(frozen=True)
class _Rows:
    """The tensors of one name with their rows."""

    name: str
    a: Tensor
    """The tensor of A, in the dtype of B."""
    b: Tensor
    """The tensor of B."""
    digests: _Digests
    """The digests of the rows."""
    models: Models

    @property
    def are_comparable(self) -> bool:
        """Whether equal rows of the tensors, which have one shape then, are no coincidence."""
        return self.a.shape == self.b.shape and self.digests.are_distinct

    @cached_property
    def order(self) -> list[int]:
        """The row of A for each row of B; empty for other rows, and if equal rows may be a coincidence."""
        if self.a.numel < FEW or not self.are_comparable:
            return []
        return find_order(self.digests.a, self.digests.b) or []


def relate_copies(name: str, models: Models) -> dict[str, Relation]:
    """Find a part of one model that the other model holds several times, so that one dimension is longer."""
    a, b = models.a[name], models.b[name]
    dim = find_different_dim(a, b)
    if dim is None:
        return {}
    side = "B" if b.shape[dim] > a.shape[dim] else "A"
    shorter, longer = sorted((a, b), key=attrgetter("numel"))
    # A part that is copied several times has a divisor of the length, and a constant has copies by chance.
    if longer.shape[dim] % shorter.shape[dim] or models.is_constant(shorter):
        return {}
    digests = _digest_distinct_rows(
        _move_first(shorter, dim),
        _move_first(longer, dim),
        models,
    )
    if digests is None:
        return {}
    copies = describe_regular_copies(digests.a, digests.b)
    if copies is None:
        return {}
    return {name: Relation(RelationKind.REPEATED, {**copies, "dim": dim, "side": side})}


def _move_first(tensor: Tensor, dim: int) -> Tensor:
    """Return the view with a dimension before all others."""
    dims = [*range(len(tensor.shape))]
    dims.remove(dim)
    return views.permute(tensor, [dim, *dims])


def relate_rows(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of experts or rows, and rows that B holds several times."""
    b = models.b[name]
    a = models.convert(models.a[name], b)
    # Integers and floats have no rows in common.
    if a is None:
        return {}
    for level in _list_levels(a, b):
        digests = _digest_rows(a, b, models, level)
        if digests is None:
            continue
        rows = _Rows(
            name,
            a,
            b,
            digests,
            models,
        )
        for find in _FINDERS.get(level, (_find_permutation,)):
            relation = find(rows)
            if relation is not None:
                return {name: relation}
    return {}


def _list_levels(a: Tensor, b: Tensor) -> list[int]:
    """Return the numbers of leading dimensions whose elements may be rows in another order."""
    dimensions = len(a.shape)
    # Tensors of different lengths have only their first dimension in common, and a matrix has no further level.
    if a.shape != b.shape or dimensions < 3:
        return [1]
    # In a tensor of three dimensions, both further levels are one.
    return sorted({1, 2, dimensions - 1})


def _find_experts(rows: _Rows) -> Relation | None:
    """Return the experts of A that B has, if the tensors are stacks of experts."""
    # A matrix of a router has a row for each expert, but it is no stack of them.
    is_stack = len(rows.a.shape) > 2 and "expert" in rows.name
    digests = rows.digests
    if not is_stack or not set(digests.b) <= set(digests.a):
        return None
    experts = tuple(digests.a.index(digest) for digest in digests.b)
    return Relation(RelationKind.EXPERT, {"experts": experts, "of": len(digests.a)})


def _find_rotary_order(rows: _Rows) -> Relation | None:
    """Return the order of rotary embeddings that the rows of a query or key of attention have."""
    # In other tensors, an order that looks like that of heads has another cause.
    if not has_rotary_rows(rows.name):
        return None
    heads = describe_heads(rows.order, rows.models.variables.get("head_dim", _LEAST_HEAD))
    if heads is None:
        return None
    return Relation(RelationKind.ROTARY, heads)


def _find_channels(rows: _Rows) -> Relation | None:
    """Return the order of the channels of an image: the first convolution of a network for BGR instead of RGB."""
    channels = rows.a.shape[1]
    # The channels of a hidden layer are too many to be listed.
    if channels > _MOST_CHANNELS:
        return None
    permutation = describe_order(rows.order)
    if (permutation["pattern"], permutation.get("size")) != ("within", channels):
        return None
    parameters: dict[str, Any] = {
        "pattern": "channels",
        "channels": tuple(rows.order[:channels]),
    }
    return Relation(RelationKind.FUSED_ORDER, parameters)


def _find_permutation(rows: _Rows) -> Relation | None:
    """Return the order in which B has the rows of A."""
    if not rows.order:
        return None
    return Relation(RelationKind.FUSED_ORDER, describe_order(rows.order))


def _find_shift(rows: _Rows) -> Relation | None:
    """Return from which row on the rows of A are at other positions, because B has more or fewer rows before them."""
    shift = describe_shift(rows.digests.a, rows.digests.b) if rows.digests.are_distinct else None
    if shift is None or min(rows.a.numel, rows.b.numel) < FEW:
        return None
    if not shift["lost"]:
        return Relation(RelationKind.FUSED_ORDER, {"pattern": "shifted", **shift})
    rows_by_part = _count_rows_in_other_parts(rows)
    moved = sum(rows_by_part.values())
    lost = shift["lost"] - moved
    if lost > 0:
        return Relation(RelationKind.PART_LOST, {"dim": 0, "added": -lost, **shift, "lost": lost})
    parameters: dict[str, Any] = {
        "pattern": "across",
        "row": shift["row"],
        "shift": abs(shift["shift"]),
        "direction": "later" if shift["shift"] > 0 else "earlier",
        "moved": moved,
        "parts": tuple(rows_by_part),
    }
    return Relation(RelationKind.FUSED_ORDER, parameters)


def _count_rows_in_other_parts(rows: _Rows) -> Mapping[str, int]:
    """Return how many rows of A that B lacks are in other parts of the fused tensor in B, by the name of the part."""
    sought_rows = set(rows.digests.a) - set(rows.digests.b)
    counts: Counter[str] = Counter()
    for name in rows.models.kinds:
        # Most differing tensors are parts of other tensors.
        if not sought_rows or not _is_other_part(name, rows):
            continue
        part = rows.models.b[name]
        digests = digest_rows(part, rows.models.files, part.shape[0])
        held_rows = sought_rows.intersection(digests)
        sought_rows -= held_rows
        counts[name] = len(held_rows)
    # A part without these rows is not named.
    return +counts


def _is_other_part(name: str, rows: _Rows) -> bool:
    """Whether a tensor of B is another part of the fused tensor, with rows of the same length."""
    stored_in_a, stored_in_b = rows.models.stored
    are_parts = are_parts_of_one(rows.name, name, stored_in_a) or are_parts_of_one(rows.name, name, stored_in_b)
    # The parts that B lacks have no rows.
    part = rows.models.b.get(name, rows.b)
    is_other = part is not rows.b and has_elements(part)
    return are_parts and is_other and (part.dtype, part.shape[1:]) == (rows.b.dtype, rows.b.shape[1:])


def _find_copies(rows: _Rows) -> Relation | None:
    """Return which rows of A a tensor of the same shape holds several times."""
    a, b = rows.a, rows.b
    if not rows.are_comparable or rows.models.is_constant(b):
        return None
    # Single elements are equal by chance, and a few wrong rows are a local change.
    is_doubtful = len(a.shape) == 1 or rows.name in rows.models.local
    describe = describe_regular_copies if is_doubtful else describe_copies
    copies = describe(rows.digests.a, rows.digests.b)
    different_rows = len(set(rows.digests.b))
    row_length = math.prod(a.shape[1:])
    if copies is None or different_rows * row_length < FEW:
        return None
    return Relation(RelationKind.REPEATED, {**copies, "dim": 0, "side": "B"})


# The relations of rows by the number of leading dimensions, in the order of precedence. At other numbers, rows only
# have another order.
_FINDERS: dict[int, tuple[Callable[[_Rows], Relation | None], ...]] = {
    1: (_find_experts, _find_rotary_order, _find_permutation, _find_shift, _find_copies),
    2: (_find_channels, _find_permutation),
}


def relate_columns(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of the columns of a matrix."""
    a, b = models.a[name], models.b[name]
    # The first row has the same elements in another order. Columns are read slowly.
    if _sort_row(a, models) != _sort_row(b, models):
        return {}
    columns_a, columns_b = views.permute(a, (1, 0)), views.permute(b, (1, 0))
    digests = _digest_distinct_rows(columns_a, columns_b, models)
    if digests is None:
        return {}
    order = find_order(digests.a, digests.b)
    if order is None:
        return {}
    return {name: Relation(RelationKind.FUSED_ORDER, {**describe_order(order), "dim": 1})}


def _sort_row(tensor: Tensor, models: Models) -> list[bytes]:
    """Return the elements of the first row of a matrix in order."""
    size = DTYPES[tensor.dtype].size
    row = bytes(models.files.read(tensor, 0, tensor.shape[1], 0))
    return sorted(row[start : start + size] for start in range(0, len(row), size))


def _digest_rows(a: Tensor, b: Tensor, models: Models, level: int) -> _Digests | None:
    """Return the digests of the rows of two tensors; None for too many rows, and if their rows differ.

    level: the number of leading dimensions whose elements are rows.
    """
    rows_a, rows_b = math.prod(a.shape[:level]), math.prod(b.shape[:level])
    fewest, most = sorted((rows_a, rows_b))
    # One row has no order, and the digests of very many rows need too much memory.
    if fewest < 2 or most > MOST_ROWS:
        return None
    # Most tensors differ in all rows, and a search for one of them is much faster.
    if not may_have_rows(a, b, rows_b, models.files):
        return None
    return _Digests(digest_rows(a, models.files, rows_a), digest_rows(b, models.files, rows_b))


def _digest_distinct_rows(a: Tensor, b: Tensor, models: Models) -> _Digests | None:
    """Return the digests of the rows of two tensors; None as well if rows of the first one are equal by chance."""
    digests = _digest_rows(a, b, models, 1)
    # Equal rows show no order, as in a mask.
    if digests is None or not digests.are_distinct:
        return None
    return digests
