"""Compare the settings of two models in the configurations beside them: equal weights may be different models.

Only settings that change the function of a model with given weights count, under the names of transformers and of
Meta. A setting in only one configuration is unknown and does not count, unless its absence turns it off.
Two models whose settings differ are not "in sync": a conversion may have changed them, or a library may ignore them.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.conversion.name_maps import read_settings
from syncheck.conversion.sides import list_snapshots
from syncheck.conversion.vocabularies import classify_vocabulary
from syncheck.messages import Note, note_if
from syncheck.records import ValueDiff
from syncheck.tensors.blocks import has_elements
from syncheck.tensors.clustering import cluster_replicas
from syncheck.tensors.kinds import matches_any
from syncheck.tensors.names import name_model_setting
from syncheck.text import SIDES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.conversion.sides import Side
    from syncheck.messages import Message
    from syncheck.records import Comparison
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# The names of one setting in several libraries.
_NAMES = {
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
}
_TIE = "tie_word_embeddings"
# Settings that are off if a configuration lacks them.
_OFF = frozenset({"rope_scaling", "sliding_window", "attn_logit_softcapping", "final_logit_softcapping"})
_SETTINGS = frozenset(
    "tie_word_embeddings num_attention_heads num_key_value_heads head_dim num_hidden_layers layer_types hidden_act "
    "hidden_activation activation_function rope_theta partial_rotary_factor rotary_pct rotary_emb_base "
    "position_embedding_type alibi rms_norm_eps layer_norm_eps norm_eps query_pre_attn_scalar scale_attn_weights "
    "logit_scale embedding_multiplier residual_multiplier attention_multiplier logits_scaling num_experts_per_tok "
    "norm_topk_prob routed_scaling_factor scoring_func topk_method n_group topk_group parallel_attn "
    "use_parallel_residual".split()
)
_NO_SCALING = {"rope_type": "default"}
_ROPE = ("rope_scaling", "rope_parameters")


def add_settings(comparison: Comparison, sides: Sequence[Side], exclude: Sequence[str], files: Files) -> Comparison:
    """Return the comparison of two models with different settings as unknown values, and with notes.

    exclude: globs of values to skip.
    """
    side_a, side_b = sides
    settings_a, settings_b = _read_settings(side_a), _read_settings(side_b)
    # Without a configuration, nothing is known.
    if not settings_a or not settings_b:
        return comparison

    notes = [*comparison.notes, *_note_settings(settings_a, settings_b)]
    diffs: list[ValueDiff] = []
    differing: list[Message] = []
    for key in _list_differing(settings_a, settings_b):
        values = (_to_value(settings_a.get(key)), _to_value(settings_b.get(key)))
        diff = ValueDiff(
            name_model_setting(key),
            by_rank=dict(zip(SIDES, values, strict=True)),
            counts=False,
            kind="model",
            unknown=True,
        )
        # Two names of equal weights are tied or not, without a difference.
        is_without_effect = key == _TIE and not _changes_output(sides, files)
        if not is_without_effect and not matches_any(diff.name, exclude):
            note = Note.ATTRIBUTE(name=key, values=diff.by_rank)
            diffs.append(diff)
            differing.append(note)

    notes += note_if(differing, Note.MODEL_SETTINGS_DIFFER(settings=tuple(differing)))
    return replace(
        comparison,
        values=(*comparison.values, *diffs),
        notes=tuple(notes),
    )


def _note_settings(settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> list[Message]:
    """Return notes about other types of models, and about settings in only one configuration."""
    # Without a type, nothing is known.
    type_a = settings_a.get("model_type", "")
    type_b = settings_b.get("model_type", type_a)
    other_type = Note.MODEL_TYPES_DIFFER(
        a=str(type_a),
        b=str(type_b),
    )
    stated_once = settings_a.keys() ^ settings_b.keys()
    absent = sorted(stated_once & _SETTINGS - _OFF)
    return [
        *note_if(type_a not in ("", type_b), other_type),
        *note_if(absent, Note.MODEL_SETTINGS_ABSENT(settings=tuple(absent))),
    ]


def _list_differing(settings_a: Mapping[str, Any], settings_b: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings with different values in both configurations."""
    stated_twice = settings_a.keys() & settings_b.keys()
    names = _SETTINGS & stated_twice
    # Other libraries have other names for the settings.
    if "model_type" in stated_twice:
        names |= _OFF

    return [name for name in sorted(names) if settings_a.get(name) != settings_b.get(name)]


def _to_value(setting: object) -> object:
    """Return a setting as a value of a report: lists and objects as JSON."""
    return json.dumps(setting, sort_keys=True) if isinstance(setting, (list, dict)) else setting


def _read_settings(side: Side) -> dict[str, Any]:
    """Return the settings in the configurations beside the files of a side, under one name each; empty without any."""
    paths = [snapshot.path for snapshot in list_snapshots(side.group)]
    settings: dict[str, Any] = {}
    for configuration in read_settings(paths, {}):
        for key, value in configuration.items():
            # A missing value is no setting.
            if value is not None:
                settings[_NAMES.get(key, key)] = value

    # Transformers 5 stores the base beside the scaling, and names the type `rope_type` only.
    rope: dict[str, Any] = {**_NO_SCALING}
    for name in _ROPE:
        parameters = settings.get(name)
        if isinstance(parameters, dict):
            rope |= parameters

    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    if "rope_theta" in rope:
        settings.setdefault("rope_theta", rope.pop("rope_theta"))

    settings.pop("rope_scaling", None)
    if rope != _NO_SCALING:
        settings["rope_scaling"] = rope
    if settings.get("use_sliding_window") is False:
        settings.pop("sliding_window", None)

    return settings


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
