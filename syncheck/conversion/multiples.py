"""Find what was merged instead of an adapter: a multiple of its product, the transposed product, or another product.

The factor of a product is computed by least squares, so it explains a difference, but does not prove a merge.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.conversion.adapted_tensors import LowRank, Merged, find_merged, view_weight
from syncheck.conversion.casts import unit_roundoff
from syncheck.conversion.merges import MOST_SLACK, SINGLE, read_blocks
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# A factor is fitted within this share, and so many standard deviations of rounding.
_SHARE, _SIGMAS = 0.02, 6.0
# Roundings of a merge in several steps: a merge of a part and of the rest, or a sum after a difference.
_ROUNDINGS = 4
# Other products are compared if the first block has this cosine at least: rounding may be as large as a product.
_LEAST_COSINE = 0.5
# Limit of the products of other modules that are compared with a tensor.
_MOST_PRODUCTS = 512


class _Candidate(NamedTuple):
    """A product that may have been merged into a tensor."""

    product: LowRank
    parameters: Mapping[str, Any]
    """The parameters of the relation; empty for the product of the tensor's own module."""
    expected_factor: float = 0.0
    """The factor in a right merge."""


class _Sums(NamedTuple):
    """A tensor that is a sum of a weight and of a multiple of a product, and the views to compute it."""

    tensor: Tensor
    """A tensor of `Merged` data."""
    weight: Tensor
    """The same view of the weight without the adapter."""
    partner: Tensor
    """The tensor of the other model."""
    unit: float
    """The unit roundoff of the weights."""
    files: Files

    def read(self, product: LowRank) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield blocks of the weight, of a product, of the sums of its absolute terms, and of the partner."""
        return read_blocks(self.tensor, self.weight, product, self.partner, self.files)


def relate_merge(name: str, models: Models) -> dict[str, Relation]:
    """Find another multiple of the product of the adapter of A, or another product."""
    tensor, partner = models.a[name], models.b[name]
    data = find_merged(tensor, partner)
    if data is None:
        return {}
    sums = _Sums(
        tensor,
        weight=view_weight(tensor, data),
        partner=partner,
        unit=max(unit_roundoff(data.base.dtype), unit_roundoff(partner.dtype)),
        files=models.files,
    )
    for product, parameters, expected_factor in _list_candidates(sums, data, models):
        factor = _fit_factor(sums, product, expected_factor)
        if factor is None:
            continue
        # A factor of about 1 is the product as it is.
        multiple = {} if abs(factor - 1) <= _SHARE else {"factor": factor}
        explanation = {**parameters, **multiple}
        if explanation:
            return {name: Relation(RelationKind.ADAPTER, explanation)}
    return {}


def _list_candidates(sums: _Sums, data: Merged, models: Models) -> Iterator[_Candidate]:
    """Yield the product of a weight, the transposed product of a square matrix, and products of other modules."""
    product = data.product
    yield _Candidate(product, {}, expected_factor=1.0)
    rows, *columns = data.shape
    transposed = replace(product, transposed=not product.transposed)
    if columns == [rows]:
        yield _Candidate(transposed, {"product": "transposed"})
    products = {id(data): _Candidate(product, {})}
    for name, tensor in models.a.items():
        other = find_merged(tensor, sums.tensor)
        if other is not None and other.shape == data.shape:
            # Parts of one fused weight have its product.
            products.setdefault(id(other), _Candidate(other.product, {"product": "other", "other": name}))
    _, *other_products = products.values()
    for candidate in other_products[:_MOST_PRODUCTS]:
        if _is_similar(sums, candidate.product):
            yield candidate


def _is_similar(sums: _Sums, product: LowRank) -> bool:
    """Whether the first block of a tensor may contain a product. Much faster than a fit of all blocks."""
    base, delta, _, value = next(sums.read(product))
    update = value - base
    lengths = math.sqrt(float(update @ update) * float(delta @ delta))
    return abs(float(update @ delta)) >= _LEAST_COSINE * lengths > 0


def _fit_factor(sums: _Sums, product: LowRank, expected_factor: float) -> float | None:
    """Return the multiple of a product that a tensor contains; None if no multiple fits.

    None as well if rounding hides the product, and if an element is not finite.

    expected_factor: of a right merge: 0 for the product of another module.
    """
    factor, noise = _fit_least_squares(sums, product)
    if not math.isfinite(factor) or noise > 0.5:
        return None
    import numpy as np

    smallest = 1e-38
    fits_tightly = True
    total_slack = total_change = 0.0
    for base, delta, terms, value in sums.read(product):
        with np.errstate(all="ignore"):
            multiple = factor * delta
            expected = base + multiple
            # Of the fitted factor, and of the sums of the product.
            doubt = noise * np.abs(delta) + (product.rank + 4) * SINGLE * abs(factor) * terms + smallest
            bound = sums.unit * (2 * np.abs(multiple) + 1.01 * np.abs(expected)) + doubt
            # A transposed difference was rounded at another position, beside another element of the weight.
            largest = np.max(np.abs(base)) + np.abs(multiple)
            wide_bound = _ROUNDINGS * sums.unit * max(1.0, abs(factor)) * largest + doubt
            distances = np.abs(value - expected)
            total_slack += float(wide_bound @ wide_bound)
            change = (factor - expected_factor) * delta
            total_change += float(change @ change)
        if not (distances <= wide_bound).all():
            return None
        fits_tightly &= bool((distances <= bound).all())
    # Bounds of several roundings are evidence only if they exclude a right merge.
    is_evident = total_slack <= MOST_SLACK**2 * total_change
    return factor if fits_tightly or is_evident else None


def _fit_least_squares(sums: _Sums, product: LowRank) -> tuple[float, float]:
    """Return the factor of a product in a tensor, and the uncertainty of the factor by rounding.

    Both are not finite without a product. The factor is not finite if an element is not finite.
    """
    import numpy as np

    totals = np.zeros(3)
    with np.errstate(all="ignore"):
        for base, delta, _, value in sums.read(product):
            totals += ((value - base) @ delta, delta @ delta, base @ base)
        factor = float(totals[0] / totals[1])
        noise = float(_SIGMAS * sums.unit * np.sqrt(totals[2] / totals[1] / sums.tensor.numel))
    return factor, noise
