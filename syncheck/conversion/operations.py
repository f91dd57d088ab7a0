"""Compare B with single operations on the tensor of the same name in A: the common steps of conversions."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from syncheck.conversion.adapted_tensors import Replaced, find_adapted, view_base
from syncheck.conversion.casts import convert, is_exact, list_narrower
from syncheck.conversion.conditions import are_whole, have_floats, have_same_shape, meet
from syncheck.conversion.model_pairs import find_different_dim
from syncheck.conversion.paddings import is_padding
from syncheck.conversion.range_losses import may_lose_range, measure_range_losses
from syncheck.conversion.recognition import HEAD_SIZES
from syncheck.findings import Relation, RelationKind
from syncheck.layout import views
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from syncheck.conversion.conditions import Condition
    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor


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
    operations = [operation for operation in _OPERATIONS if meet(operation.conditions, name, models)]
    for operation in operations:
        for candidate in operation.list_candidates(name, models):
            conversion = models.equals(candidate.view, candidate.target)
            if conversion is not None:
                parameters = {**conversion, **candidate.parameters}
                if candidate.kind is RelationKind.CAST:
                    parameters = {**_find_range_losses(name, parameters, models), **parameters}
                return {name: Relation(candidate.kind, parameters)}
    return {}


def _find_range_losses(name: str, parameters: Mapping[str, Any], models: Models) -> Mapping[str, Any]:
    """Return the parameters of a conversion beyond the range of its dtype; none within the range."""
    source, copy = models.a[name], models.b[name]
    if parameters["side"] == "A":
        source, copy = copy, source
    dtype = parameters["dtype"]
    if not may_lose_range(source, dtype, copy.dtype):
        return {}
    return measure_range_losses(source, copy, dtype, models.files).pattern


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
    yield Candidate(
        RelationKind.ADAPTER,
        parameters,
        view=base,
        target=models.b[name],
    )


def _list_earlier(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor of the model before the update."""
    if name in models.base:
        yield Candidate(
            RelationKind.BASE,
            parameters={},
            view=models.base[name],
            target=models.b[name],
        )


def _list_casts(name: str, models: Models) -> Iterator[Candidate]:
    """Yield conversions of each model to another dtype: to the dtype of the other model, or to a dtype in between."""
    a, b = models.a[name], models.b[name]
    for side, source, copy in (("B", a, b), ("A", b, a)):
        if source.dtype != copy.dtype:
            yield Candidate(
                RelationKind.CAST,
                parameters={"side": side},
                view=source,
                target=copy,
            )
        for dtype in list_narrower(source.dtype, copy.dtype):
            parameters = {"side": side, "dtype": dtype}
            if not is_exact(dtype, copy.dtype):
                # Two conversions, of which no single one explains the copy.
                parameters["then"] = copy.dtype
            yield Candidate(
                RelationKind.CAST,
                parameters=parameters,
                view=convert(source, (dtype, copy.dtype), models.files),
                target=copy,
            )


def _list_truncations(name: str, models: Models) -> Iterator[Candidate]:
    """Yield conversions of each model to a smaller dtype that cut off bits, where the other model keeps the result."""
    a, b = models.a[name], models.b[name]
    for side, source, copy in (("B", a, b), ("A", b, a)):
        dtypes = [copy.dtype] if DTYPES[copy.dtype].size < DTYPES[source.dtype].size else []
        dtypes += [dtype for dtype in list_narrower(source.dtype, copy.dtype) if is_exact(dtype, copy.dtype)]
        for dtype in dtypes:
            yield Candidate(
                RelationKind.CAST,
                parameters={"side": side, "dtype": dtype, "pattern": "truncated"},
                view=convert(source, (dtype, copy.dtype), models.files, truncate=True),
                target=copy,
            )


def _list_transpositions(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor of A with two dimensions exchanged, if the shapes agree then."""
    a, b = models.a[name], models.b[name]
    # The elements stay in order if one of the dimensions has a single index.
    long_dims = [dim for dim, length in enumerate(a.shape) if length > 1]
    for first, second in itertools.combinations(long_dims, 2):
        order = [*range(len(a.shape))]
        order[first], order[second] = second, first
        view = views.permute(a, order)
        if view.shape == b.shape:
            yield Candidate(
                RelationKind.TRANSPOSED,
                parameters={"dims": (first, second)},
                view=view,
                target=b,
            )


def _list_rotary_orders(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the tensor of A with the rows of each head in the other orders of rotary embeddings."""
    a, b = models.a[name], models.b[name]
    for head_dim in _list_head_sizes(a.shape, models):
        half = head_dim // 2
        for order, sizes in (("interleaved", (2, half)), ("half", (half, 2))):
            yield Candidate(
                RelationKind.ROTARY,
                parameters={"head_dim": head_dim, "to": order},
                view=_exchange_rows(a, sizes),
                target=b,
            )


def _list_head_sizes(shape: Sequence[int], models: Models) -> list[int]:
    """Return the possible sizes of the heads of a weight or bias of attention."""
    if len(shape) not in (1, 2):
        return []
    sizes = dict.fromkeys([models.variables.get("head_dim", 0), *HEAD_SIZES])
    # The halves of a head of two rows are single rows, in either order.
    even_sizes = [size for size in sizes if size > 2 and size % 2 == 0]
    return [size for size in even_sizes if shape[0] % size == 0]


def _exchange_rows(tensor: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return the view with the rows of each head as the columns of a matrix of the given sizes."""
    heads = tensor.shape[0] // math.prod(sizes)
    divided = views.unflatten(tensor, 0, (heads, *sizes))
    further_dims = range(3, len(divided.shape))
    exchanged = views.permute(divided, (0, 2, 1, *further_dims))
    return views.flatten(views.flatten(exchanged, 0), 0)


def _list_paddings(name: str, models: Models) -> Iterator[Candidate]:
    """Yield the common part of both tensors, if their shapes differ in one dimension."""
    a, b = models.a[name], models.b[name]
    dim = find_different_dim(a, b)
    # Tensors without elements have no common part.
    if dim is None or 0 in (a.numel, b.numel):
        return
    length = min(a.shape[dim], b.shape[dim])
    longer = a if a.shape[dim] > length else b
    is_complete = is_padding(longer, dim, length, models.files)
    yield Candidate(
        RelationKind.PADDED if is_complete else RelationKind.PART_LOST,
        parameters={"dim": dim, "added": b.shape[dim] - a.shape[dim]},
        view=_cut(a, dim, length),
        target=_cut(b, dim, length),
    )


def _cut(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return the first indices of a dimension; the whole tensor if the dimension has no further indices."""
    return tensor if tensor.shape[dim] == length else views.narrow(tensor, dim, 0, length)


class _Operation(NamedTuple):
    """A step of a conversion."""

    list_candidates: Callable[[str, Models], Iterator[Candidate]]
    """Yields the relations that the step may leave."""
    conditions: tuple[Condition, ...] = ()
    """The step is not compared for tensors that do not meet all conditions."""


# In the order of precedence. The model before the update explains less than the base model of an adapter. The values of
# a sparse tensor have any length, so they are not padded.
_OPERATIONS = (
    _Operation(_list_unmerged),
    _Operation(_list_earlier),
    _Operation(_list_casts, (have_same_shape, have_floats)),
    _Operation(_list_truncations, (have_same_shape, have_floats)),
    _Operation(_list_transpositions),
    _Operation(_list_rotary_orders, (have_same_shape,)),
    _Operation(_list_paddings, (are_whole,)),
)
