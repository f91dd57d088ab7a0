"""Prove that a tensor is the merge of a base model and an adapter."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.adapted_tensors import Merged, Product, find_adapted, find_merged, reread, view_weight
from syncheck.conversion.casts import convert, is_conversion, is_exact, list_narrower, round_values, unit_roundoff
from syncheck.findings import Relation, RelationKind
from syncheck.frozen import record
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.conversion.adapted_tensors import LowRank
    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.dtypes import DType

# The rounding of a product may be this share of the product at most, by root mean square over a block. Otherwise the
# bound would accept weights without the product.
MOST_SLACK = 0.25
# Unit roundoff of float32, in which PEFT computes products, and the distance of numbers of float64.
SINGLE, _DOUBLE = 2.0**-24, 2.0**-52


def is_merge(tensor: Tensor, partner: Tensor, dtype: str | None, files: Files, *, to_partner: bool) -> bool | None:
    """Return whether a tensor is a possible result of a merge; None if rounding hides the product.

    tensor: of `Merged` data.
    partner: the tensor of the other model.
    dtype: of one accepted conversion; None without a conversion.
    to_partner: whether the partner is the converted copy; else it is the source.
    """
    data = find_merged(tensor, partner)
    source, copy = (tensor, partner) if to_partner else (partner, tensor)
    if data is None or not _is_accepted(source.dtype, copy.dtype, dtype):
        return False
    computations = _list_computations(
        tensor,
        partner,
        data,
        dtype,
        files,
        to_partner=to_partner,
    )
    results = set()
    for computation in computations:
        result = _agrees(computation, partner, files)
        if result:
            return True
        results.add(result)
    # One computation whose bounds are too wide leaves the merge possible.
    return None if None in results else False


def _is_accepted(source: str, copy: str, dtype: str | None) -> bool:
    """Whether the dtypes of a tensor and its copy agree with one accepted conversion; None for no conversion."""
    if dtype is None:
        return source == copy
    # A less precise copy would be rounded once more than the user accepts.
    return is_exact(dtype, copy)


@record
class _Computation:
    """One of the ways to compute a merged tensor."""

    tensor: Tensor
    """A view of the merged weight."""
    base: Tensor
    """The same view of the weight without the adapter, after any conversion."""
    product: LowRank
    """The product of the factors, after any conversion of them."""
    rounding: tuple[str, ...]
    """The dtypes of the sum, in turn."""
    partner_rounding: tuple[str, ...] = ()
    """The dtypes to which the other tensor is converted before the comparison."""


def _list_computations(
    tensor: Tensor, partner: Tensor, data: Merged, dtype: str | None, files: Files, *, to_partner: bool
) -> list[_Computation]:
    """Return the ways to compute a merged tensor. Parameters are those of `is_merge`, and the data of the tensor."""
    bases = [view_weight(tensor, data)]
    products = [data.product]
    rounding: tuple[str, ...] = (tensor.dtype,)
    partner_rounding: tuple[str, ...] = ()
    if dtype is not None and to_partner:
        rounding = (dtype, partner.dtype)
        # Loaded in the other dtype, and then merged.
        bases.append(convert(bases[0], (dtype,), files))
    elif dtype is not None:
        partner_rounding = (dtype, tensor.dtype)
    narrow = rounding[0]
    if unit_roundoff(narrow) > unit_roundoff(data.product.up.dtype):
        # The adapter was loaded in this dtype, too.
        products.append(data.product.convert(narrow))
    computations = []
    for product, base in itertools.product(products, bases):
        computations.append(
            _Computation(
                tensor,
                base,
                product,
                rounding,
                partner_rounding,
            )
        )
    return computations


def _agrees(computation: _Computation, partner: Tensor, files: Files) -> bool | None:
    """Return whether all elements are within the bounds of a computation; None if the bounds are too wide."""
    for block in _compare_blocks(computation, partner, files):
        if block.hides_product:
            return None
        if not block.accepted.all():
            return False
    return True


class _Block(NamedTuple):
    """A block of elements, compared with the bounds of a computation."""

    accepted: Any
    """Whether each element is within its bounds."""
    hides_product: bool
    """Whether the bounds are so wide that they may include weights without the product."""


def _compare_blocks(computation: _Computation, partner: Tensor, files: Files) -> Iterator[_Block]:
    """Yield all blocks of the other tensor, compared with the bounds of a computation.

    Rounding keeps the order of numbers. So if the sum lies between two bounds, the rounded sum lies between the rounded
    bounds.
    """
    import numpy as np

    product = computation.product
    target = [DTYPES[name] for name in computation.rounding]
    partner_target = [DTYPES[name] for name in computation.partner_rounding]
    # A sum may be rounded to float32 before it is rounded to a smaller dtype.
    last = SINGLE if target[-1].size < 4 else _DOUBLE
    # PEFT rounds a product and its multiple to the dtype of the adapter, and the result to the dtype of the weight.
    weight_unit = max(unit_roundoff(computation.base.dtype), unit_roundoff(computation.rounding[0]))
    unit = (1 + unit_roundoff(product.up.dtype)) ** 2 * (1 + weight_unit) - 1
    blocks = read_blocks(computation.tensor, computation.base, product, partner, files)
    for weight, delta, magnitude, value in blocks:
        rounded = _round(value, partner_target)
        with np.errstate(all="ignore"):
            expected = weight + delta
            noise = (product.rank + 4) * SINGLE * magnitude
            slack = noise + unit * (np.abs(delta) + noise)
            finite = np.isfinite(expected) & np.isfinite(slack)
            total_slack, total_delta = np.sum(slack[finite] ** 2), np.sum(delta[finite] ** 2)
            slack += last * np.abs(expected)
            lower, upper = _round(expected - slack, target), _round(expected + slack, target)
            # A number beyond the range of the dtype became infinite, which is more than rounding.
            is_within = finite & np.isfinite(rounded) & (lower <= rounded) & (rounded <= upper)
            # An infinity or a NaN of the sum is exactly that in the result, and a finite number is none of them.
            equal = (rounded == expected) | (np.isnan(rounded) & np.isnan(expected))
            accepted = is_within | (~finite & equal)
        yield _Block(accepted, bool(total_slack > MOST_SLACK**2 * total_delta))


def _round(values: Any, dtypes: Sequence[DType]) -> Any:
    """Return float64 values, rounded to each of the dtypes in turn."""
    import numpy as np

    from syncheck.tensors.differences import widen

    if not dtypes:
        return values
    return widen(dtypes[-1], round_values(values, dtypes)).astype(np.float64)


def read_blocks(
    tensor: Tensor, base: Tensor, product: LowRank, partner: Tensor, files: Files
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield blocks of the weight, of the product, of the sums of its absolute terms, and of another tensor."""
    from syncheck.tensors.differences import read_float64

    delta = reread(tensor, "float64", Product(product, magnitude=False))
    magnitude = reread(tensor, "float64", Product(product, magnitude=True))
    sources = (base, delta, magnitude, partner)
    # The products are float64, so blocks of their size fit into memory for all tensors.
    for start, count in ranges([delta]):
        weight, added, terms, value = (read_float64(t, files, start, count, i) for i, t in enumerate(sources))
        yield weight, added, terms, value


def relate_converted_merge(name: str, models: Models) -> dict[str, Relation]:
    """Find the conversion between merged weights and the other model, within the bounds that `--cast` accepts."""
    a, b = models.a[name], models.b[name]
    for side, source, copy in (("B", a, b), ("A", b, a)):
        dtype = _find_conversion(source, copy, models.files)
        if dtype is not None:
            parameters = {"side": side, "dtype": dtype, "pattern": "merged"}
            return {name: Relation(RelationKind.CAST, parameters)}
    return {}


def _find_conversion(source: Tensor, copy: Tensor, files: Files) -> str | None:
    """Return the dtype to which a tensor may have been converted, if either is a merge; None if no dtype fits."""
    pair = find_merged_pair(source, copy)
    if pair is None:
        return None
    for dtype in _list_conversions(source, copy, files):
        if is_merge(pair.merged, pair.partner, dtype, files, to_partner=pair.to_partner):
            return dtype
    return None


def _list_conversions(source: Tensor, copy: Tensor, files: Files) -> list[str]:
    """Return the possible dtypes of a conversion: the dtype of the copy, and all that change no element of the copy.

    The bounds of a merge are wide in a dtype of few bits, so that they alone prove no conversion to it.
    """
    narrower = list_narrower(source.dtype, copy.dtype)
    dtypes = [dtype for dtype in narrower if is_conversion(copy, copy, dtype, files)]
    if source.dtype != copy.dtype:
        dtypes.insert(0, copy.dtype)
    return dtypes


class MergedPair(NamedTuple):
    """A merged tensor, and the tensor of the other model."""

    merged: Tensor
    partner: Tensor
    to_partner: bool
    """Whether the partner is the converted copy; else it is the source."""


def find_merged_pair(source: Tensor, copy: Tensor) -> MergedPair | None:
    """Return a tensor and its copy, if either is a merge; None without a merge. The source precedes if both are."""
    for pair in (MergedPair(source, copy, to_partner=True), MergedPair(copy, source, to_partner=False)):
        if isinstance(find_adapted(pair.merged), Merged):
            return pair
    return None


def find_outlier(pair: MergedPair, dtype: str, files: Files) -> int | None:
    """Return the position of the only element that is beyond the rounding of a merge; None for another number.

    dtype: of the conversion.
    """
    data = find_merged(pair.merged, pair.partner)
    if data is None:
        return None
    computations = _list_computations(
        pair.merged,
        pair.partner,
        data,
        dtype,
        files,
        to_partner=pair.to_partner,
    )
    for computation in computations:
        positions = _list_outliers(computation, pair.partner, files)
        if len(positions) == 1:
            return positions[0]
    return None


def _list_outliers(computation: _Computation, partner: Tensor, files: Files) -> list[int]:
    """Return the positions of elements beyond the bounds of a computation, until a block has the second one."""
    import numpy as np

    positions: list[int] = []
    start = 0
    for block in _compare_blocks(computation, partner, files):
        outliers = np.nonzero(~block.accepted)[0] + start
        positions += outliers[:2].tolist()
        if len(positions) > 1:
            break
        start += len(block.accepted)
    return positions
