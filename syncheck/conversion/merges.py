"""Prove that a tensor is the merge of a base model and an adapter, and find the multiple of an adapter in a tensor."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from syncheck.conversion.adapted_tensors import Product, find_merged, reread, view_weight
from syncheck.conversion.casts import convert, round_values, unit_roundoff
from syncheck.findings import Relation, RelationKind
from syncheck.frozen import record
from syncheck.tensors.blocks import ranges
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from syncheck.conversion.adapted_tensors import LowRank, Merged
    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files
    from syncheck.tensors.dtypes import DType

# A factor of the product is fitted within this share, and so many standard deviations of rounding.
_SHARE, _SIGMAS = 0.02, 6.0
# The rounding of a product may be this share of the product at most, by root mean square over a block. Otherwise the
# bound would accept weights without the product.
_MOST_SLACK = 0.25
# Unit roundoff of float32, in which PEFT computes products, and the distance of numbers of float64.
_SINGLE, _DOUBLE = 2.0**-24, 2.0**-52


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
    return unit_roundoff(copy) <= unit_roundoff(dtype)


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
    """Return whether all elements are within the bounds of a computation; None if the bounds are too wide.

    Rounding keeps the order of numbers. So if the sum lies between two bounds, the rounded sum lies between the rounded
    bounds.
    """
    import numpy as np

    product = computation.product
    target = [DTYPES[name] for name in computation.rounding]
    partner_target = [DTYPES[name] for name in computation.partner_rounding]
    # A sum may be rounded to float32 before it is rounded to a smaller dtype.
    last = _SINGLE if target[-1].size < 4 else _DOUBLE
    # PEFT rounds a product and its multiple to the dtype of the adapter, and the result to the dtype of the weight.
    weight_unit = max(unit_roundoff(computation.base.dtype), unit_roundoff(computation.rounding[0]))
    unit = (1 + unit_roundoff(product.up.dtype)) ** 2 * (1 + weight_unit) - 1
    blocks = _read_blocks(computation.tensor, computation.base, product, partner, files)
    for weight, delta, magnitude, value in blocks:
        rounded = _round(value, partner_target)
        with np.errstate(all="ignore"):
            expected = weight + delta
            noise = (product.rank + 4) * _SINGLE * magnitude
            slack = noise + unit * (np.abs(delta) + noise)
            finite = np.isfinite(expected) & np.isfinite(slack)
            total_slack, total_delta = np.sum(slack[finite] ** 2), np.sum(delta[finite] ** 2)
            if total_slack > _MOST_SLACK**2 * total_delta:
                return None
            slack += last * np.abs(expected)
            lower, upper = _round(expected - slack, target), _round(expected + slack, target)
            # A number beyond the range of the dtype became infinite, which is more than rounding.
            is_within = finite & np.isfinite(rounded) & (lower <= rounded) & (rounded <= upper)
            # An infinity or a NaN of the sum is exactly that in the result, and a finite number is none of them.
            equal = (rounded == expected) | (np.isnan(rounded) & np.isnan(expected))
            accepted = is_within | (~finite & equal)
        if not accepted.all():
            return False
    return True


def _round(values: Any, dtypes: Sequence[DType]) -> Any:
    """Return float64 values, rounded to each of the dtypes in turn."""
    import numpy as np

    from syncheck.tensors.differences import widen

    if not dtypes:
        return values
    return widen(dtypes[-1], round_values(values, dtypes)).astype(np.float64)


def _read_blocks(
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


def relate_merge(name: str, models: Models) -> dict[str, Relation]:
    """Find another multiple of the product of the adapter of A."""
    factor = fit_factor(models.a[name], models.b[name], models.files)
    if factor is None:
        return {}
    return {name: Relation(RelationKind.ADAPTER, {"factor": factor})}


def fit_factor(tensor: Tensor, partner: Tensor, files: Files) -> float | None:
    """Return the multiple of the adapter's product that another tensor contains; None if no multiple fits.

    The factor is computed by least squares, so it explains a difference, but does not prove a merge. None as well if
    rounding hides the adapter, and if an element is not finite.
    """
    data = find_merged(tensor, partner)
    if data is None:
        return None
    weight = view_weight(tensor, data)
    unit = max(unit_roundoff(data.base.dtype), unit_roundoff(partner.dtype))
    factor, noise = _fit_least_squares(tensor, weight, data.product, partner, unit, files)
    is_precise = math.isfinite(factor) and noise <= 0.5
    # A factor of about 1 is the adapter as it is, which explains nothing.
    if not is_precise or abs(factor - 1) <= _SHARE:
        return None
    import numpy as np

    smallest = 1e-38
    for base, delta, terms, value in _read_blocks(tensor, weight, data.product, partner, files):
        with np.errstate(all="ignore"):
            multiple = factor * delta
            expected = base + multiple
            bound = unit * (2 * np.abs(multiple) + 1.01 * np.abs(expected)) + noise * np.abs(delta)
            bound += (data.product.rank + 4) * _SINGLE * abs(factor) * terms + smallest
            fits = np.abs(value - expected) <= bound
        if not fits.all():
            return None
    return factor


def _fit_least_squares(
    tensor: Tensor, weight: Tensor, product: LowRank, partner: Tensor, unit: float, files: Files
) -> tuple[float, float]:
    """Return the factor of a product in another tensor, and the uncertainty of the factor by rounding.

    Both are not finite without a product. The factor is not finite if an element is not finite.

    tensor: of `Merged` data.
    weight: the same view of the weight without the adapter.
    unit: the unit roundoff of the weights.
    """
    import numpy as np

    sums = np.zeros(3)
    with np.errstate(all="ignore"):
        for base, delta, _, value in _read_blocks(tensor, weight, product, partner, files):
            sums += ((value - base) @ delta, delta @ delta, base @ base)
        factor = float(sums[0] / sums[1])
        noise = float(_SIGMAS * unit * np.sqrt(sums[2] / sums[1] / tensor.numel))
    return factor, noise
