"""Find how the differing tensors of B follow from A: the evidence of the findings SYN301 to SYN317.

Most relations are a view of A, or of another model, whose bytes equal those of B, if necessary after one conversion to
the dtype of B. Wrong candidates cost little: a few elements of each are read first, and reading stops at the first
difference. Numerical relations come last: they need nearly all elements to differ.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from syncheck.conversion.conditions import (
    are_loaded,
    are_matrices,
    are_weights,
    are_whole,
    differ_in_part,
    differ_widely,
    have_floats,
    have_many_elements,
    have_numbers,
    have_other_dtype,
    have_rows,
    have_same_dtype,
    have_same_row_shape,
    have_same_shape,
    meet,
)
from syncheck.conversion.constant_parts import relate_constant_part
from syncheck.conversion.correlations import relate_unrelated
from syncheck.conversion.factors import relate_blocks, relate_constants
from syncheck.conversion.local_changes import PART, list_local, relate_local
from syncheck.conversion.merges import relate_converted_merge
from syncheck.conversion.missing_scales import relate_fitted, relate_unscaled
from syncheck.conversion.model_copies import relate_model_copy
from syncheck.conversion.model_pairs import FEW, Models
from syncheck.conversion.multiples import relate_merge
from syncheck.conversion.operations import relate_operation
from syncheck.conversion.other_positions import relate_elsewhere, relate_shards
from syncheck.conversion.quantized import relate_quantized
from syncheck.conversion.rounding_grids import relate_grid
from syncheck.conversion.row_relations import relate_columns, relate_copies, relate_rows
from syncheck.conversion.stored_parts import relate_stored
from syncheck.conversion.ties import list_partners, relate_tied, relate_untied
from syncheck.conversion.wrong_scales import relate_wrong_scales
from syncheck.findings import Relation, RelationKind
from syncheck.records import Evidence
from syncheck.tensors.blocks import has_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.conversion.conditions import Condition
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor

# Fewer different values than this in a rounded tensor may be its initial values.
_FEWEST_VALUES = 3


class Step(NamedTuple):
    """The search for one relation between the tensors of one name."""

    relate: Callable[[str, Models], dict[str, Relation]]
    """Returns the relation of the tensor, and the relations of other tensors with the same evidence; may be empty."""
    conditions: tuple[Condition, ...] = ()
    """The search is skipped for tensors that do not meet all conditions."""


# In the order of precedence: relations that the bytes prove, and relations that fit the numbers. A relation of all
# tensors is searched before the next one, because one tensor may show the relations of other tensors.
_PROOFS = (
    Step(relate_copies, (have_same_dtype, have_many_elements, are_whole)),
    Step(relate_operation),
    Step(relate_converted_merge, (have_same_shape, have_floats)),
    Step(relate_local, (have_same_shape, have_other_dtype, have_many_elements, have_floats)),
    Step(relate_stored),
    Step(relate_unscaled, (have_same_shape,)),
    Step(relate_model_copy, (differ_widely,)),
    Step(relate_tied, (differ_widely,)),
    Step(relate_elsewhere, (differ_widely,)),
    Step(relate_shards, (have_same_dtype,)),
    Step(relate_rows, (have_same_row_shape, are_whole)),
    Step(relate_columns, (have_same_shape, have_same_dtype, have_many_elements, are_matrices, are_whole)),
)
_FITS = (
    Step(relate_merge, (differ_widely, are_weights)),
    Step(relate_quantized, (differ_widely, are_weights, have_same_shape)),
    Step(relate_wrong_scales, (differ_widely, are_weights, have_same_shape)),
    Step(relate_grid, (differ_widely, are_weights, have_same_shape, have_floats)),
    Step(relate_fitted, (differ_widely, are_weights, have_same_shape, have_rows, have_floats)),
    Step(relate_constants, (differ_widely, are_weights, have_same_shape, have_floats)),
    Step(relate_blocks, (differ_widely, are_weights, have_same_shape, have_rows, have_floats)),
    Step(relate_untied, (differ_widely, are_weights)),
    Step(relate_unrelated, (differ_widely, are_weights, are_loaded, have_same_shape, have_floats)),
    Step(relate_constant_part, (differ_in_part, have_same_shape, have_numbers)),
)


def add_relations(diffs: Sequence[TensorDiff], models: Models) -> tuple[TensorDiff, ...]:
    """Return the diffs with the relations found between their tensors."""
    differing = [diff for diff in diffs if diff.out_of_sync]
    models.kinds = {diff.name: diff.kind for diff in differing}
    models.local = list_local(differing)
    models.partial = list_local(differing, PART)
    models.partners = list_partners(models)
    names = [name for name in models.kinds if _is_comparable(name, models)]
    relations: dict[str, Relation] = {}
    _run_steps(_PROOFS, names, models, relations)
    relations = _drop_chance_casts(relations, models)
    _run_steps(_FITS, names, models, relations)
    related_diffs = []
    for diff in diffs:
        relation = relations.get(diff.name)
        related = diff if relation is None else _with_relation(diff, relation)
        related_diffs.append(related)
    return tuple(related_diffs)


def _run_steps(steps: Sequence[Step], names: Sequence[str], models: Models, relations: dict[str, Relation]) -> None:
    """Add the relations of these tensors, from the first step with a result."""
    for step in steps:
        for name in names:
            if name not in relations and meet(step.conditions, name, models):
                relations |= step.relate(name, models)


def _drop_chance_casts(relations: Mapping[str, Relation], models: Models) -> dict[str, Relation]:
    """Return the relations without roundings by chance, unless another tensor shows the same rounding.

    A step counter of 19 is 20 in an 8-bit dtype, a rounded bias of 4 elements is no evidence either, and a norm near 1
    is 1 in a dtype with few bits.
    """
    names_by_rounding: dict[tuple[object, object], list[str]] = defaultdict(list)
    for name, relation in relations.items():
        # Between tensors of different dtypes, a cast is no rounding to a dtype in between.
        if relation.kind is RelationKind.CAST and have_same_dtype(name, models):
            side, dtype = relation.parameters["side"], relation.parameters["dtype"]
            names_by_rounding[side, dtype].append(name)
    evident_relations = dict(relations)
    for (rounded_side, _), names in names_by_rounding.items():
        model = models.a if rounded_side == "A" else models.b
        # One evident tensor is enough for all tensors with the same rounding.
        if not any(_shows_rounding(model[name], models) for name in names):
            for name in names:
                del evident_relations[name]
    return evident_relations


def _shows_rounding(rounded: Tensor, models: Models) -> bool:
    """Whether a tensor has too many values to be unchanged by a rounding by chance."""
    return rounded.numel >= FEW and models.count_values(rounded) >= _FEWEST_VALUES


def _is_comparable(name: str, models: Models) -> bool:
    """Whether both models have the elements of a tensor."""
    return all(name in model and has_elements(model[name]) for model in (models.a, models.b))


def _with_relation(diff: TensorDiff, relation: Relation) -> TensorDiff:
    """Add a relation to the evidence of a tensor, and of each of its facts."""
    facts = tuple(_with_relation(fact, relation) for fact in diff.facts)
    evidence = replace(diff.evidence or Evidence(), relation=relation)
    return replace(diff, evidence=evidence, facts=facts)
