"""Compare the settings of two models in the configurations beside them: equal weights may be different models.

Two models whose settings differ are not "in sync": a conversion may have changed the settings, or a library may
ignore a setting.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.conversion.vocabularies import classify_vocabulary
from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.settings.differences import Difference, list_differences
from syncheck.settings.neutral import SIZES
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.kinds import matches_any
from syncheck.tensors.names import name_model_setting
from syncheck.text import SIDES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.records import Comparison
    from syncheck.settings.configurations import Configurations
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

_TIE = "tie_word_embeddings"
_QUANTIZATION = "quantization_config"


def add_settings(
    comparison: Comparison,
    sides: Sequence[Side],
    exclude: Sequence[str],
    files: Files,
    *,
    assumes_tie: bool,
) -> Comparison:
    """Return the comparison of two models with different settings as unknown values, and with notes.

    exclude: globs of values to skip.
    assumes_tie: whether one model lacks an output layer, and nothing states whether it uses its embedding.
    """
    a, b = (side.configurations for side in sides)
    unreadable = (*a.unreadable, *b.unreadable)
    notes = [*comparison.notes, *note_if(unreadable, Note.UNREADABLE_CONFIGURATIONS(files=unreadable))]
    notes += note_if(_have_other_types(a, b), Note.MODEL_TYPES_DIFFER(a=a.model_type, b=b.model_type))

    diffs: list[ValueDiff] = []
    differing: list[Message] = []
    differences = list_differences(a, b)
    # Without a configuration, nothing is known.
    if assumes_tie and {*a.by_name, *b.by_name}:
        differences.append(Difference(_TIE, a=None, b=None))

    for difference in differences:
        diff = _to_diff(difference)
        # The tensors of a model of another size, or of a quantized model, differ themselves.
        if difference.name in (_QUANTIZATION, *SIZES):
            has_effect = not any(tensor.out_of_sync for tensor in comparison.tensors)
        elif difference.name == _TIE:
            # Two names of equal weights are tied or not, without a difference.
            has_effect = assumes_tie or _changes_output(sides, files)
        else:
            has_effect = True

        if has_effect and not matches_any(diff.name, exclude):
            diffs.append(diff)
            differing.append(Note.ATTRIBUTE(name=difference.key, values=diff.by_rank))

    notes += note_if(differing, Note.MODEL_SETTINGS_DIFFER(settings=tuple(differing)))
    return replace(
        comparison,
        values=(*comparison.values, *diffs),
        notes=tuple(notes),
    )


def _have_other_types(a: Configurations, b: Configurations) -> bool:
    """Whether both configurations state a type, and another one."""
    return "" not in (a.model_type, b.model_type) and a.model_type != b.model_type


def _to_diff(difference: Difference) -> ValueDiff:
    """Return a difference as a value of a report."""
    values = (difference.a, difference.b)
    return ValueDiff(
        name_model_setting(difference.key),
        by_rank=dict(zip(SIDES, values, strict=True)),
        counts=False,
        kind="model",
        unknown=True,
    )


def _changes_output(sides: Sequence[Side], files: Files) -> bool:
    """Whether a model stores another output layer than its configuration ties, or none that it does not tie."""
    for side in sides:
        outputs: list[Tensor] = []
        embeddings: list[Tensor] = []
        tensors_of_kind = {"output": outputs, "embedding": embeddings}
        for name, tensor in side.model.tensors.items():
            kind = classify_vocabulary(name)
            tensors_of_kind.get(kind, []).append(tensor)

        # A loader initializes an output layer without a tensor in the file.
        if side.output_tie is False and not outputs:
            return True

        for output, embedding in itertools.product(outputs, embeddings):
            if side.output_tie and _differ(output, embedding, files):
                return True

    return False


def _differ(output: Tensor, embedding: Tensor, files: Files) -> bool:
    """Whether an output layer and an embedding of one size have different values."""
    conditions = (
        (output.dtype, output.shape) == (embedding.dtype, embedding.shape),
        has_elements(output),
        has_elements(embedding),
    )
    return all(conditions) and len(cluster_replicas([output, embedding], files)) > 1
