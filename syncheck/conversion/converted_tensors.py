"""Compare two models, and compare tensors again after the accepted conversion if it does not explain a difference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.comparison.replicas import compare_group
from syncheck.conversion.acceptance import with_tensors
from syncheck.conversion.adapted_tensors import are_comparable
from syncheck.conversion.casts import convert
from syncheck.conversion.side_evidence import locate_worst_element
from syncheck.layout.groups import CheckpointGroup
from syncheck.messages import Note
from syncheck.options import build_selection
from syncheck.records import Reason
from syncheck.tensors.names import normalize_keys
from syncheck.text import SIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.sides import Side
    from syncheck.options import DiffOptions
    from syncheck.records import Comparison
    from syncheck.snapshots import Snapshot, Tensor
    from syncheck.tensors.blocks import Files


def compare_models(models: Sequence[Snapshot], options: DiffOptions, *, histograms: bool) -> Comparison:
    """Compare A and B, which stand in the place of ranks."""
    pair = CheckpointGroup(
        " and ".join(model.path for model in models),
        step=None,
        ranks=tuple(zip(SIDES, models, strict=True)),
        grouping=(),
    )
    selection = replace(build_selection(options), histograms=histograms)
    return compare_group(pair, selection)


def compare_converted(
    comparison: Comparison, sides: Sequence[Side], options: DiffOptions, files: Files, *, histograms: bool
) -> Comparison:
    """Return the comparison with the values of tensors that differ in more than the accepted conversion.

    Without the conversion, tensors of different dtypes have no common values. comparison: with all tensors that the
    conversion explains.
    """
    if options.cast is None:
        return comparison
    tensors_a, tensors_b = models = [normalize_keys(side.model.tensors) for side in sides]
    converted: dict[str, Tensor] = {}
    for diff in comparison.tensors:
        is_open = diff.reason is Reason.DTYPE or diff.status == "different"
        if is_open and are_comparable(tensors_a[diff.name], tensors_b[diff.name]):
            dtypes = (options.cast, tensors_b[diff.name].dtype)
            converted[diff.name] = convert(tensors_a[diff.name], dtypes, files)
    # Values and ties have been compared.
    bare_models = [replace(side.model, values={}, model_values={}, ties=()) for side in sides]
    pair = [
        replace(bare_models[0], tensors=converted),
        replace(bare_models[1], tensors={name: tensors_b[name] for name in converted}),
    ]
    different = {}
    for diff in compare_models(pair, options, histograms=histograms).tensors:
        # A tolerance accepts no conversion, and a conversion that lost elements beyond its range leaves equal values.
        if diff.status == "different":
            different[diff.name] = locate_worst_element(diff, sides, models)
    diffs = []
    for diff in comparison.tensors:
        values = different.get(diff.name, diff)
        diffs.append(replace(values, kind=diff.kind))
    comparison = with_tensors(comparison, diffs)
    note = Note.CONVERTED(dtype=options.cast, count=len(different), names=tuple(different))
    return replace(comparison, notes=(*comparison.notes, note)) if different else comparison
