"""Find B among the rows of A: rows in another order, and rows that one of the models holds several times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from syncheck.conversion.casts import convert
from syncheck.conversion.fused_parts import has_rotary_rows
from syncheck.conversion.model_pairs import FEW
from syncheck.conversion.recognition import is_readable
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


def relate_copies(name: str, models: Models) -> dict[str, Relation]:
    """Find a part of one model that the other model holds several times, so that one dimension is longer."""
    a, b = models.a[name], models.b[name]
    if len(a.shape) != len(b.shape) or a.dtype != b.dtype or min(a.numel, b.numel) < FEW or models.is_part(name):
        return {}
    different_dims = [dim for dim in range(len(a.shape)) if a.shape[dim] != b.shape[dim]]
    if len(different_dims) != 1:
        return {}
    (dim,) = different_dims
    side, longer, shorter = ("B", b, a) if b.shape[dim] > a.shape[dim] else ("A", a, b)
    if longer.shape[dim] % shorter.shape[dim]:
        return {}
    order = [dim, *(other for other in range(len(a.shape)) if other != dim)]
    digests = _digest_both(views.permute(shorter, order), views.permute(longer, order), 1, models)
    if digests is None or not _are_distinct(digests[0]) or models.is_constant(shorter):
        return {}
    copies = describe_copies(*digests)
    if copies is None or copies["pattern"] == "other":
        return {}
    return {name: Relation(RelationKind.REPEATED, {**copies, "dim": dim, "side": side})}


def relate_rows(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of experts or rows, and rows that B holds several times."""
    a, b = models.a[name], models.b[name]
    if a.shape[1:] != b.shape[1:] or not a.shape or not a.numel or not b.numel or models.is_part(name):
        return {}
    if a.dtype != b.dtype:
        if not (is_readable(a) and is_readable(b)):
            return {}
        a = convert(a, (b.dtype,), models.files)
    # The number of leading dimensions whose elements are rows.
    levels = [1]
    if a.shape == b.shape and len(a.shape) > 2:
        levels += [2, len(a.shape) - 1]
    for level in dict.fromkeys(levels):
        digests = _digest_both(a, b, level, models)
        if digests is None:
            continue
        relation = _compare_rows(name, (a, b), digests, level)
        if relation is None and level == 1:
            relation = _find_copies(name, models, digests)
        if relation is not None:
            return {name: relation}
    return {}


def _find_copies(name: str, models: Models, digests: tuple[list[bytes], list[bytes]]) -> Relation | None:
    """Return which rows of A a tensor of the same shape holds several times. digests: of the rows."""
    a, b = models.a[name], models.b[name]
    if a.shape != b.shape or not _are_distinct(digests[0]) or models.is_constant(b):
        return None
    copies = describe_copies(*digests)
    if copies is None or len(set(digests[1])) * math.prod(a.shape[1:]) < FEW:
        return None
    # Single elements are equal by chance, and a few wrong rows are a local change.
    if copies["pattern"] == "other" and (len(a.shape) == 1 or name in models.local):
        return None
    return Relation(RelationKind.REPEATED, {**copies, "dim": 0, "side": "B"})


def relate_columns(name: str, models: Models) -> dict[str, Relation]:
    """Find a permutation of the columns of a matrix."""
    a, b = models.a[name], models.b[name]
    if a.shape != b.shape or a.dtype != b.dtype or len(a.shape) != 2 or a.numel < FEW or models.is_part(name):
        return {}
    # The first row has the same elements in another order. Columns are read slowly.
    if _sort_row(a, models) != _sort_row(b, models):
        return {}
    digests = _digest_both(views.permute(a, (1, 0)), views.permute(b, (1, 0)), 1, models)
    if digests is None or not _are_distinct(digests[0]):
        return {}
    order = find_order(*digests)
    if order is None:
        return {}
    return {name: Relation(RelationKind.FUSED_ORDER, {**describe_order(order), "dim": 1})}


def _sort_row(tensor: Tensor, models: Models) -> list[bytes]:
    """Return the elements of the first row of a matrix in order."""
    size = DTYPES[tensor.dtype].size
    row = bytes(models.files.read(tensor, 0, tensor.shape[1], 0))
    return sorted(row[start : start + size] for start in range(0, len(row), size))


def _digest_both(a: Tensor, b: Tensor, level: int, models: Models) -> tuple[list[bytes], list[bytes]] | None:
    """Return the digests of the rows of two tensors; None for too many rows, and if their rows differ.

    level: the number of leading dimensions whose elements are rows.
    """
    rows = [math.prod(tensor.shape[:level]) for tensor in (a, b)]
    if max(rows) > MOST_ROWS or min(rows) < 2 or not may_have_rows(a, b, rows[1], models.files):
        return None
    return digest_rows(a, models.files, rows[0]), digest_rows(b, models.files, rows[1])


def _are_distinct(digests: Sequence[bytes]) -> bool:
    """Whether most rows differ. Masks and other tensors with few different rows have equal rows by chance."""
    return 2 * len(set(digests)) > len(digests)


def _compare_rows(
    name: str, pair: tuple[Tensor, Tensor], digests: tuple[list[bytes], list[bytes]], level: int
) -> Relation | None:
    """Return how the rows of B follow from the rows of A.

    pair: the tensors of A and B.
    digests: of their rows.
    level: the number of leading dimensions whose elements are rows.
    """
    a, b = pair
    if level == 1 and len(a.shape) > 2 and "expert" in name and set(digests[1]) <= set(digests[0]):
        experts = tuple(digests[0].index(digest) for digest in digests[1])
        return Relation(RelationKind.EXPERT, {"experts": experts, "of": len(digests[0])})
    if a.shape != b.shape or a.numel < FEW or not _are_distinct(digests[0]):
        return None
    order = find_order(*digests)
    return None if order is None else _describe_permutation(name, a.shape, order, level)


def _describe_permutation(name: str, shape: Sequence[int], order: Sequence[int], level: int) -> Relation:
    """Return the relation of a tensor with rows in another order."""
    heads = describe_heads(order) if level == 1 and has_rotary_rows(name) else None
    if heads is not None:
        return Relation(RelationKind.ROTARY, heads)
    parameters: dict[str, Any] = describe_order(order)
    # The channels of an image: the first convolution of a network for BGR instead of RGB.
    if level == 2 and parameters.get("size") == shape[1] <= _MOST_CHANNELS and parameters["pattern"] == "within":
        parameters = {"pattern": "channels", "channels": tuple(order[: shape[1]])}
    return Relation(RelationKind.FUSED_ORDER, parameters)
