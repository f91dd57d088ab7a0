"""Compare the settings of two models in the configurations beside them: equal weights may be different models.

Two configurations of one type of model are compared in every setting except the settings of `neutral_settings`.
A setting in only one configuration counts, unless its value is a known default. Configurations of different types, or
of different libraries, have few settings in common, so only settings with a known meaning are compared. A setting in
only one configuration counts if its absence turns the setting off.

Two models whose settings differ are not "in sync": a conversion may have changed the settings, or a library may
ignore a setting.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.configurations import TEXT, read_configurations
from syncheck.conversion.neutral_settings import SIZES, is_default, is_neutral
from syncheck.conversion.sides import list_snapshots
from syncheck.conversion.vocabularies import classify_vocabulary
from syncheck.frozen import record
from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.kinds import matches_any
from syncheck.tensors.names import name_model_setting
from syncheck.text import SIDES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from syncheck.conversion.configurations import Configuration, Configurations
    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.records import Comparison
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

_TIE = "tie_word_embeddings"
_QUANTIZATION = "quantization_config"
# Settings of every library that are off if a configuration lacks them.
_OFF = frozenset({"rope_scaling", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
# Settings with one meaning in all types of models.
_KNOWN = frozenset(
    "tie_word_embeddings num_attention_heads num_key_value_heads head_dim num_hidden_layers layer_types hidden_act "
    "hidden_activation activation_function rope_theta partial_rotary_factor position_embedding_type alibi rms_norm_eps "
    "layer_norm_eps norm_eps query_pre_attn_scalar scale_attn_weights logit_scale embedding_multiplier "
    "residual_multiplier attention_multiplier logits_scaling num_experts_per_tok norm_topk_prob routed_scaling_factor "
    "scoring_func topk_method n_group topk_group parallel_attn use_parallel_residual".split()
)


@record
class _Difference:
    """A setting with another value in each model. a, b: the values; None if a configuration lacks the setting."""

    key: str
    a: Any
    b: Any

    @property
    def name(self) -> str:
        """The key without the names of nested configurations."""
        return self.key.rpartition(".")[2]


def add_settings(comparison: Comparison, sides: Sequence[Side], exclude: Sequence[str], files: Files) -> Comparison:
    """Return the comparison of two models with different settings as unknown values, and with notes.

    exclude: globs of values to skip.
    """
    a, b = map(_read, sides)
    unreadable = (*a.unreadable, *b.unreadable)
    notes = [*comparison.notes, *note_if(unreadable, Note.UNREADABLE_CONFIGURATIONS(files=unreadable))]
    differences = [*_list_unreadable(a, b)]
    pairs = _pair(a, b)
    for pair in pairs:
        differences += _compare_in_full(*pair)
    # Without a configuration, nothing is known.
    if not pairs and a.by_name and b.by_name:
        settings = (a.merge(), b.merge())
        differences += _compare_known(*settings)
        notes += _note_types(*settings)

    diffs: list[ValueDiff] = []
    differing: list[Message] = []
    for difference in differences:
        diff = _to_diff(difference)
        # The tensors of a model of another size, or of a quantized model, differ themselves.
        if difference.name in (_QUANTIZATION, *SIZES):
            has_effect = not any(tensor.out_of_sync for tensor in comparison.tensors)
        elif difference.name == _TIE:
            # Two names of equal weights are tied or not, without a difference.
            has_effect = _changes_output(sides, files)
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


def _read(side: Side) -> Configurations:
    """Return the configurations of a side."""
    return read_configurations([snapshot.path for snapshot in list_snapshots(side.group)])


def _list_unreadable(a: Configurations, b: Configurations) -> Iterator[_Difference]:
    """Yield a difference for each file without a configuration, if the other model has a configuration."""
    if b.by_name:
        for path in a.unreadable:
            yield _Difference(
                os.path.basename(path),
                a="unreadable",
                b="readable",
            )
    if a.by_name:
        for path in b.unreadable:
            yield _Difference(
                os.path.basename(path),
                a="readable",
                b="unreadable",
            )


def _pair(a: Configurations, b: Configurations) -> list[tuple[Configuration, Configuration]]:
    """Return the configurations of both models with one file name and one type of model."""
    pairs = []
    for file_name in sorted(a.by_name.keys() & b.by_name.keys()):
        first, second = a.by_name[file_name], b.by_name[file_name]
        if first.model_type == second.model_type:
            pairs.append((first, second))

    return pairs


def _compare_in_full(a: Configuration, b: Configuration) -> Iterator[_Difference]:
    """Yield the settings that may change the function, of two configurations of one type."""
    # An older form of some types has the settings of the language model beside the other settings.
    if TEXT in a.nested.keys() ^ b.nested.keys():
        a, b = a.merge_text(), b.merge_text()

    yield from _list_differing("", a, b)
    for name in sorted(a.nested.keys() & b.nested.keys()):
        yield from _list_differing(name, a, b)
    for name in sorted(a.nested.keys() ^ b.nested.keys()):
        yield _Difference(
            name,
            a=a.nested.get(name),
            b=b.nested.get(name),
        )


def _list_differing(name: str, a: Configuration, b: Configuration) -> Iterator[_Difference]:
    """Yield the settings that differ between nested configurations with a name, or the outer ones without a name."""
    stated_a, stated_b = a.get_stated(name), b.get_stated(name)
    complete_a, complete_b = a.get_complete(name), b.get_complete(name)
    model_type = stated_a.get("model_type", a.model_type)
    prefix = f"{name}.".lstrip(".")
    for key in sorted(stated_a.keys() | stated_b.keys()):
        value_a, value_b = complete_a.get(key), complete_b.get(key)
        reasons = (
            is_neutral(key, model_type),
            _are_equal(value_a, value_b),
            # Without a value, the default applies.
            is_default(
                key,
                value_b,
                complete_a,
                model_type,
            ),
            is_default(
                key,
                value_a,
                complete_b,
                model_type,
            ),
        )
        if not any(reasons):
            yield _Difference(
                f"{prefix}{key}",
                a=value_a,
                b=value_b,
            )


def _note_types(settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> list[Message]:
    """Return notes about other types of models, and about settings in only one configuration."""
    # Without a type, nothing is known.
    type_a = settings_a.get("model_type", "")
    type_b = settings_b.get("model_type", type_a)
    other_type = Note.MODEL_TYPES_DIFFER(
        a=str(type_a),
        b=str(type_b),
    )
    stated_once = settings_a.keys() ^ settings_b.keys()
    absent = sorted(stated_once & _KNOWN)
    return [
        *note_if(type_a not in ("", type_b), other_type),
        *note_if(absent, Note.MODEL_SETTINGS_ABSENT(settings=tuple(absent))),
    ]


def _compare_known(settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> Iterator[_Difference]:
    """Yield the settings with one meaning in all types of models that differ."""
    stated_twice = settings_a.keys() & settings_b.keys()
    names = _KNOWN & stated_twice
    # Other libraries have other names for the settings.
    if "model_type" in stated_twice:
        names |= _OFF

    for name in sorted(names):
        value_a, value_b = settings_a.get(name), settings_b.get(name)
        if not _are_equal(value_a, value_b):
            yield _Difference(name, value_a, value_b)


def _are_equal(value_a: object, value_b: object) -> bool:
    """Whether two values of a file are equal; NaN, which Python reads, equals NaN."""
    return value_a == value_b or repr(value_a) == repr(value_b)


def _to_diff(difference: _Difference) -> ValueDiff:
    """Return a difference as a value of a report: lists and objects as JSON."""
    values: list[Any] = []
    for setting in (difference.a, difference.b):
        is_container = isinstance(setting, (list, dict))
        if is_container:
            setting = json.dumps(setting, sort_keys=True)

        values.append(setting)

    return ValueDiff(
        name_model_setting(difference.key),
        by_rank=dict(zip(SIDES, values, strict=True)),
        counts=False,
        kind="model",
        unknown=True,
    )


def _changes_output(sides: Sequence[Side], files: Files) -> bool:
    """Whether a model whose configuration ties its output layer stores another weight of this layer."""
    for side in sides:
        outputs: list[Tensor] = []
        embeddings: list[Tensor] = []
        tensors_of_kind = {"output": outputs, "embedding": embeddings}
        for name, tensor in side.model.tensors.items():
            kind = classify_vocabulary(name)
            tensors_of_kind.get(kind, []).append(tensor)

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
