"""Compare B with single operations on the tensor of the same name in A: the common steps of conversions."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from syncheck.conversion.casts import convert
from syncheck.conversion.merges import Replaced, find_adapted, view_base
from syncheck.conversion.model_pairs import find_different_dim
from syncheck.conversion.recognition import HEAD_SIZES, are_readable
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor

# Possible dtypes of a model in between, the most precise dtype first.
_CASTS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Candidate(NamedTuple):
    """A possible relation of a tensor of B."""

    kind: RelationKind
    """The relation, if the view has the bytes of the target."""
    parameters: Mapping[str, Any]
    """The parameters of the relation."""
    view: Tensor
    """The tensor after the operation, usually of A."""
    target: Tensor
    """The tensor that equals the view, usually of B."""


def relate_operation(name: str, models: Models) -> dict[str, Relation]:
    """Compare B with single operations on the tensor of the same name."""
    for list_candidates in _OPERATIONS:
        for candidate in list_candidates(name, models):
            conversion = models.equals(candidate.view, candidate.target)
            if conversion is not None:
                return {name: Relation(candidate.kind, {**conversion, **candidate.parameters})}
    return {}


def _list_unmerged(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor without the adapter that was merged into A."""
    a = models.a[name]
    adapted = find_adapted(a)
    if adapted is None:
        return
    base = view_base(a, adapted)
    if base is None:
        return
    parameters = {"pattern": "replaced"} if isinstance(adapted, Replaced) else {}
    yield Candidate(RelationKind.ADAPTER, parameters, base, models.b[name])


def _list_earlier(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor of the model before the update."""
    if name in models.base:
        yield Candidate(RelationKind.BASE, {}, models.base[name], models.b[name])


def _list_casts(name: str, models: Models) -> Iterator[Candidate]:
    """Yield conversions of each model to another dtype: to the dtype of the other model, or to a dtype in between."""
    a, b = models.a[name], models.b[name]
    if a.shape != b.shape or not are_readable(a, b):
        return
    for side, source, copy in (("B", a, b), ("A", b, a)):
        if source.dtype != copy.dtype:
            yield Candidate(RelationKind.CAST, {"side": side}, source, copy)
        for dtype in _CASTS:
            # Only a smaller dtype loses digits.
            if dtype == copy.dtype or DTYPES[dtype].size >= DTYPES[source.dtype].size:
                continue
            rounded = convert(source, (dtype, copy.dtype), models.files)
            yield Candidate(RelationKind.CAST, {"side": side, "dtype": dtype}, rounded, copy)


def _list_transpositions(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor of A with two dimensions exchanged, if the shapes agree then."""
    a, b = models.a[name], models.b[name]
    for first, second in itertools.combinations(range(len(a.shape)), 2):
        # The elements stay in order if one of the dimensions has a single index.
        if min(a.shape[first], a.shape[second]) < 2:
            continue
        order = [*range(len(a.shape))]
        order[first], order[second] = second, first
        if tuple(a.shape[dim] for dim in order) == b.shape:
            yield Candidate(RelationKind.TRANSPOSED, {"dims": (first, second)}, views.permute(a, order), b)


def _list_rotary_orders(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor of A with the rows of each head in the other orders of rotary embeddings."""
    a, b = models.a[name], models.b[name]
    if a.shape != b.shape or len(a.shape) not in (1, 2):
        return
    for head_dim in dict.fromkeys([models.variables.get("head_dim", 0), *HEAD_SIZES]):
        # The halves of a head of two rows are single rows, in either order.
        if head_dim <= 2 or head_dim % 2 or a.shape[0] % head_dim:
            continue
        heads, half = a.shape[0] // head_dim, head_dim // 2
        for order, sizes in (("interleaved", (2, half)), ("half", (half, 2))):
            divided = views.unflatten(a, 0, (heads, *sizes))
            further_dims = range(3, len(divided.shape))
            exchanged = views.permute(divided, (0, 2, 1, *further_dims))
            view = views.flatten(views.flatten(exchanged, 0), 0)
            yield Candidate(RelationKind.ROTARY, {"head_dim": head_dim, "to": order}, view, b)


def _list_paddings(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the common part of both tensors, if their shapes differ in one dimension."""
    a, b = models.a[name], models.b[name]
    # The values of a sparse tensor have any length.
    if models.is_part(name):
        return
    dim = find_different_dim(a, b)
    if dim is None or 0 in (a.numel, b.numel):
        return
    length = min(a.shape[dim], b.shape[dim])
    parameters = {"dim": dim, "added": b.shape[dim] - a.shape[dim]}
    yield Candidate(RelationKind.PADDED, parameters, _cut(a, dim, length), _cut(b, dim, length))


def _cut(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return the first indices of a dimension; the whole tensor if the dimension has no further indices."""
    if tensor.shape[dim] == length:
        return tensor
    return views.narrow(tensor, dim, 0, length)


# In the order of precedence. The model before the update explains less than the base model of an adapter.
_OPERATIONS: tuple[Callable[[str, Models], Iterator[Candidate]], ...] = (
    _list_unmerged,
    _list_earlier,
    _list_casts,
    _list_transpositions,
    _list_rotary_orders,
    _list_paddings,
)
