"""Recognize a model that is one shard of tensor parallelism, beside the whole model, by the sizes of its tensors.

The file of a single rank has all names, and looks like a model without some rows and columns. Its sizes show a shard:
all tensors with another shape have 1/N of one dimension, some of the first dimension (layers divided by outputs) and
some of the second (by inputs), and no layer is whole if all libraries divide this layer. If the models have other
names, all norms are equal, and the matrices of one model together have N times the elements of the other model.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from syncheck.conversion.refused_tensors import refuse_tensors
from syncheck.conversion.sides import list_snapshots
from syncheck.conversion.vocabularies import has_vocabulary
from syncheck.frozen import record
from syncheck.layout.distinct_shards import is_always_divided
from syncheck.layout.replicated_names import find_replicated
from syncheck.messages import Detail
from syncheck.records import Reason
from syncheck.tensors.names import normalize_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.sides import Side
    from syncheck.records import Comparison

    _Shape = Sequence[int]


# Share of the elements of a model.
_MOST_PADDING = 0.1


@record
class _Division:
    """How the tensor of a shard follows from the whole tensor."""

    dim: int
    """The divided dimension."""
    shards: int
    """The number of shards; 0 if a shape does not follow from the other one."""


def explain_single_shard(comparison: Comparison, sides: Sequence[Side]) -> Comparison:
    """Return the comparison with refused tensors in the place of other shapes and names, if a model is one shard."""
    other_shapes = _select_names(comparison, {Reason.SHAPE})
    unpaired = _select_names(comparison, {Reason.SHAPE, Reason.MISSING})
    # Otherwise, most names agree, and shapes show shards.
    have_other_names = 2 * len(other_shapes) < len(unpaired) == len(comparison.tensors)
    if not have_other_names:
        unpaired = []

    for names, count_shards in ((other_shapes, _count_by_shapes), (unpaired, _count_by_elements)):
        for whole, part in (sides, reversed(sides)):
            shards = count_shards(names, whole, part)
            if shards > 1:
                detail = Detail.SINGLE_SHARD(
                    side=part.label,
                    shards=shards,
                    files=tuple(os.path.basename(snapshot.path) for snapshot in list_snapshots(part.group)),
                )
                return refuse_tensors(comparison, dict.fromkeys(names, detail))

    return comparison


def _select_names(comparison: Comparison, reasons: set[Reason]) -> list[str]:
    """Return the names of the tensors without a comparison for some reasons."""
    return [diff.name for diff in comparison.tensors if diff.reason in reasons]


def _count_by_elements(names: Sequence[str], whole: Side, part: Side) -> int:
    """Return the number of shards of a model with other names; 0 if the sizes of the part are no sizes of a shard.

    Equal norms show a common origin. The matrices are divided, so no matrix has a counterpart.

    names: of the tensors with another shape, or in one model only.
    """
    unpaired_names = frozenset(names)
    paired_dimensions: set[int] = set()
    elements: list[int] = []
    for side in (whole, part):
        total = 0
        for name, tensor in normalize_keys(side.model.tensors).items():
            if name in unpaired_names:
                total += tensor.numel
            else:
                paired_dimensions.add(len(tensor.shape))

        elements.append(total)

    elements_of_whole, elements_of_part = elements
    shards = round(elements_of_whole / max(1, elements_of_part))
    # A vocabulary may be padded.
    excess = abs(shards * elements_of_part - elements_of_whole)
    conditions = (
        # The files of several ranks have parts of known sizes.
        len(part.group.ranks) == 1,
        paired_dimensions == {1},
        find_replicated(names).isdisjoint(names),
        excess <= _MOST_PADDING * elements_of_whole,
    )
    return shards if all(conditions) else 0


def _count_by_shapes(names: Sequence[str], whole: Side, part: Side) -> int:
    """Return the number of shards of a model; 0 if the sizes of the part are no sizes of a shard.

    names: of the tensors whose shapes differ.
    """
    whole_tensors = normalize_keys(whole.model.tensors)
    part_tensors = normalize_keys(part.model.tensors)
    dims: set[int] = set()
    counts: set[int] = set()
    for name in names:
        division = _divide(
            name,
            whole_tensors[name].full_shape,
            part_tensors[name].full_shape,
        )
        dims.add(division.dim)
        counts.add(division.shards)

    shards = max(counts, default=0)
    # Ranks with a common head of grouped-query attention hold larger shards.
    remainders = {shards % max(1, count) for count in counts}
    equal_names = whole_tensors.keys() & part_tensors.keys() - set(names)
    conditions = (
        remainders == {0},
        0 not in counts,
        dims >= {0, 1},
        not any(map(is_always_divided, equal_names)),
    )
    return shards if all(conditions) else 0


def _divide(name: str, whole: _Shape, part: _Shape) -> _Division:
    """Return the division of a tensor. whole, part: shapes."""
    none = _Division(dim=0, shards=0)
    if len(whole) != len(part):
        return none

    dims = [dim for dim, size in enumerate(whole) if size != part[dim]]
    # Tensor parallelism divides one dimension.
    if len(dims) != 1 or part[dims[0]] == 0:
        return none

    (dim,) = dims
    shards, remainder = divmod(whole[dim], part[dim])
    # Libraries pad the rows of a vocabulary to divide them.
    if remainder and not has_vocabulary(name):
        return none

    return _Division(dim, shards + bool(remainder))
