"""Find B among the rows of A: rows in another order, and rows that one of the models holds several times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.casts import convert
from syncheck.conversion.fused_parts import has_rotary_rows
from syncheck.conversion.model_pairs import FEW, find_different_dim
from syncheck.conversion.recognition import are_readable
from syncheck.conversion.rows import (
    MOST_ROWS,
    describe_copies,
    describe_heads,
    describe_order,
    digest_rows,
    find_order,
    may_have_rows,
)
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor

# Limit of the channels whose order is listed.
_MOST_CHANNELS = 8


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


def relate_copies(name: str, models: Models) -> dict[str, Relation]:
    """Find a part of one model that the other model holds several times, so that one dimension is longer."""
    a, b = models.a[name], models.b[name]
    dim = find_different_dim(a, b)
    if dim is None:
        return {}
    side, longer, shorter = "A", a, b
    if b.shape[dim] > a.shape[dim]:
        side, longer, shorter = "B", b, a
    if longer.shape[dim] % shorter.shape[dim] or models.is_constant(shorter):
        return {}
    digests = _digest_distinct_rows(_move_first(shorter, dim), _move_first(longer, dim), models)
    if digests is None:
        return {}
    copies = describe_copies(digests.a, digests.b)
    if copies is None or copies["pattern"] == "other":
        return {}
    return {name: Relation(RelationKind.REPEATED, {**copies, "dim": dim, "side": side})}


def _move_first(tensor: Tensor, dim: int) -> Tensor:
    """Return the view with a dimension before all others."""
    further_dims = [further for further in range(len(tensor.shape)) if further != dim]
    return views.permute(tensor, [dim, *further_dims])


def relate_rows(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of experts or rows, and rows that B holds several times."""
    pair = _convert_rows(models.a[name], models.b[name], models)
    if pair is None:
        return {}
    a, b = pair
    # The number of leading dimensions whose elements are rows.
    levels = [1]
    if a.shape == b.shape and len(a.shape) > 2:
        levels += [2, len(a.shape) - 1]
    for level in dict.fromkeys(levels):
        digests = _digest_rows(a, b, models, level)
        if digests is None:
            continue
        relation = _compare_rows(name, (a, b), digests, level)
        if relation is None and level == 1:
            relation = _find_copies(name, models, digests)
        if relation is not None:
            return {name: relation}
    return {}


def _convert_rows(a: Tensor, b: Tensor, models: Models) -> tuple[Tensor, Tensor] | None:
    """Return two tensors whose rows can be compared, in the dtype of B; None without comparable rows."""
    if not a.shape or a.shape[1:] != b.shape[1:]:
        return None
    if 0 in (a.numel, b.numel):
        return None
    if a.dtype == b.dtype:
        return a, b
    if not are_readable(a, b):
        return None
    return convert(a, (b.dtype,), models.files), b


def _find_copies(name: str, models: Models, digests: _Digests) -> Relation | None:
    """Return which rows of A a tensor of the same shape holds several times. digests: of the rows."""
    a, b = models.a[name], models.b[name]
    if a.shape != b.shape or not digests.are_distinct or models.is_constant(b):
        return None
    copies = describe_copies(digests.a, digests.b)
    row_length = math.prod(a.shape[1:])
    if copies is None or len(set(digests.b)) * row_length < FEW:
        return None
    # Single elements are equal by chance, and a few wrong rows are a local change.
    is_doubtful = len(a.shape) == 1 or name in models.local
    if is_doubtful and copies["pattern"] == "other":
        return None
    return Relation(RelationKind.REPEATED, {**copies, "dim": 0, "side": "B"})


def relate_columns(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of the columns of a matrix."""
    a, b = models.a[name], models.b[name]
    # The first row has the same elements in another order. Columns are read slowly.
    if len(a.shape) != 2 or _sort_row(a, models) != _sort_row(b, models):
        return {}
    digests = _digest_distinct_rows(views.permute(a, (1, 0)), views.permute(b, (1, 0)), models)
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
    if min(rows_a, rows_b) < 2 or max(rows_a, rows_b) > MOST_ROWS:
        return None
    if not may_have_rows(a, b, rows_b, models.files):
        return None
    return _Digests(digest_rows(a, models.files, rows_a), digest_rows(b, models.files, rows_b))


def _digest_distinct_rows(a: Tensor, b: Tensor, models: Models) -> _Digests | None:
    """Return the digests of the rows of two tensors; None as well if rows of the first one are equal by chance."""
    digests = _digest_rows(a, b, models, 1)
    if digests is None or not digests.are_distinct:
        return None
    return digests


def _compare_rows(name: str, pair: tuple[Tensor, Tensor], digests: _Digests, level: int) -> Relation | None:
    """Return how the rows of B follow from the rows of A.

    pair: the tensors of A and B.
    digests: of their rows.
    level: the number of leading dimensions whose elements are rows.
    """
    a, b = pair
    is_stack_of_experts = level == 1 and len(a.shape) > 2 and "expert" in name
    if is_stack_of_experts and set(digests.b) <= set(digests.a):
        experts = tuple(digests.a.index(digest) for digest in digests.b)
        return Relation(RelationKind.EXPERT, {"experts": experts, "of": len(digests.a)})
    if a.shape != b.shape or a.numel < FEW or not digests.are_distinct:
        return None
    order = find_order(digests.a, digests.b)
    if order is None:
        return None
    return _describe_permutation(name, a.shape, order, level)


def _describe_permutation(name: str, shape: Sequence[int], order: Sequence[int], level: int) -> Relation:
    """Return the relation of a tensor with rows in another order."""
    if level == 1 and has_rotary_rows(name):
        heads = describe_heads(order)
        if heads is not None:
            return Relation(RelationKind.ROTARY, heads)
    permutation = describe_order(order)
    if level == 2 and permutation["pattern"] == "within":
        channels = shape[1]
        # The channels of an image: the first convolution of a network for BGR instead of RGB.
        if permutation["size"] == channels <= _MOST_CHANNELS:
            parameters: dict[str, Any] = {"pattern": "channels", "channels": tuple(order[:channels])}
            return Relation(RelationKind.FUSED_ORDER, parameters)
    return Relation(RelationKind.FUSED_ORDER, permutation)
