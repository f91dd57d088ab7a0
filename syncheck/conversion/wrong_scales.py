"""Find the blocks of a quantized tensor whose stored scale is wrong: the other model shows a multiple of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.conversion.quantized import MOST_ROUNDING, Quantized, find_unit, read_rows
from syncheck.conversion.recognition import get_computed, is_readable
from syncheck.findings import Relation, RelationKind

if TYPE_CHECKING:
    from syncheck.conversion.model_pairs import Models
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Elements that show the scale of a block at least. Few elements fit any scale.
_FEWEST = 16
# The uncertainty of a fitted factor: the numbers of a block are rounded by up to half a step.
_DOUBT = 2.0**-6


def relate_wrong_scales(name: str, models: Models) -> dict[str, Relation]:
    """Find the blocks of a quantized tensor that are a multiple of the other model, within half a step."""
    for side, tensor, original in (("B", models.b[name], models.a[name]), ("A", models.a[name], models.b[name])):
        quantized = get_computed(tensor, Quantized)
        # Two quantized tensors have no original.
        if quantized is None or not is_readable(original) or isinstance(original.data, Quantized):
            continue
        parameters = _fit_scales(quantized, original, models.files)
        if parameters:
            return {name: Relation(RelationKind.FACTORS, {**parameters, "side": side})}
    return {}


def _fit_scales(quantized: Quantized, original: Tensor, files: Files) -> dict[str, Any]:
    """Return the wrong scales as parameters of a relation; empty if scales alone do not explain the difference."""
    import numpy as np

    factors = _find_factors(quantized, original, files)
    wrong = factors != 1
    conditions = (
        wrong.any(),
        # Zeros and infinities are no scales.
        np.isfinite(factors).all(),
        factors.all(),
        # A factor within its uncertainty is no wrong scale.
        (np.abs(factors[wrong] - 1) > 2 * _DOUBT).all(),
    )
    if not all(conditions) or not _are_within_half_a_step(quantized, factors, original, files):
        return {}
    block_rows, block_columns = quantized.blocks
    rows, columns = quantized.shape
    return {
        "block": (min(rows, block_rows), min(columns, block_columns)),
        "of": quantized.shape,
        "count": factors.size,
        "wrong": int(np.count_nonzero(wrong)),
        "first": tuple(int(indices[0]) for indices in np.nonzero(wrong)),
        "least": float(factors[wrong].min()),
        "most": float(factors[wrong].max()),
    }


def _find_factors(quantized: Quantized, original: Tensor, files: Files) -> Any:
    """Return the factor of each block: 1 within half a step of the original, else fitted by least squares.

    A block with too few elements other than zero, and another tensor, have NaN.
    """
    import numpy as np

    unit = find_unit(original)
    starts = np.arange(0, quantized.shape[1], quantized.blocks[1])
    products, squares, counts, worst = np.zeros((4, *quantized.scales.shape))
    for first, values, bound, expected in read_rows(quantized, original, files):
        blocks = np.arange(first, first + len(values)) // quantized.blocks[0]
        with np.errstate(all="ignore"):
            ratios = np.abs(values - expected) / (bound + unit * np.abs(expected) + 1e-30)
            np.add.at(products, blocks, np.add.reduceat(values * expected, starts, axis=1))
            np.add.at(squares, blocks, np.add.reduceat(expected * expected, starts, axis=1))
        np.add.at(counts, blocks, np.add.reduceat((values != 0).astype(float), starts, axis=1))
        np.maximum.at(worst, blocks, np.maximum.reduceat(np.nan_to_num(ratios, nan=np.inf), starts, axis=1))
    with np.errstate(all="ignore"):
        fitted = np.where(counts >= _FEWEST, products / squares, np.nan)
    return np.where(worst <= MOST_ROUNDING, 1.0, fitted)


def _are_within_half_a_step(quantized: Quantized, factors: Any, original: Tensor, files: Files) -> bool:
    """Whether all elements of a tensor are within half a step of the original after a division by the factors."""
    import numpy as np

    unit = find_unit(original)
    columns = np.arange(quantized.shape[1]) // quantized.blocks[1]
    for first, values, bound, expected in read_rows(quantized, original, files):
        rows = np.arange(first, first + len(values)) // quantized.blocks[0]
        divisors = factors[rows][:, columns]
        # Right scales have no uncertainty.
        doubt = np.where(divisors == 1, unit, _DOUBT) * np.abs(expected)
        distances = np.abs(values / divisors - expected)
        if not (distances <= MOST_ROUNDING * (bound / np.abs(divisors) + doubt) + 1e-30).all():
            return False
    return True
