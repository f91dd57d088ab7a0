"""Compare the configurations of two models: equal weights under other settings may be different models.

Two configurations of one type of model are compared in every setting except the settings of `neutral`. Configurations
of different types, or of different libraries, have few settings in common, so only settings with a known meaning are
compared. A setting that a configuration does not state has its default, and differs from every value if its default is
not known.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from syncheck.frozen import record
from syncheck.settings.configurations import TEXT
from syncheck.settings.defaults import MEGATRON, UNKNOWN
from syncheck.settings.neutral import SIZES, find_effective, is_neutral

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from syncheck.settings.configurations import Configuration, Configurations

# Settings with one meaning in all types of models.
_KNOWN = frozenset(
    "tie_word_embeddings num_attention_heads num_key_value_heads head_dim hidden_size vocab_size num_hidden_layers "
    "layer_types hidden_act hidden_activation rope_theta partial_rotary_factor "
    "position_embedding_type alibi rms_norm_eps layer_norm_eps norm_eps query_pre_attn_scalar scale_attn_weights "
    "logit_scale embedding_multiplier residual_multiplier attention_multiplier logits_scaling num_experts_per_tok "
    "norm_topk_prob routed_scaling_factor scoring_func topk_method n_group topk_group parallel_attn "
    "use_parallel_residual rope_scaling sliding_window attn_logit_softcapping final_logit_softcapping".split()
)
# Arguments of Megatron without another form in transformers, if they are on.
_KNOWN_ARGUMENTS = frozenset(
    "args.rotary_interleaved args.softmax_scale args.no_rope_freq args.window_attn_skip_freq "
    "args.apply_residual_connection_post_layernorm args.moe_router_score_function".split()
)
# Settings in every complete list of Megatron's arguments.
_ALWAYS_SAVED = {
    MEGATRON: frozenset("num_attention_heads num_key_value_heads rope_theta rms_norm_eps layer_norm_eps".split()),
}
# Settings that a nested configuration, or the tensors, state in place of a configuration without them.
_STATED_ELSEWHERE = frozenset({*SIZES, "model_type"})


@record
class Difference:
    """A setting with another value in each model.

    a, b: the values for a report; None if a configuration lacks the setting.
    """

    key: str
    a: Any
    b: Any

    @property
    def name(self) -> str:
        """The key without the names of nested configurations."""
        return self.key.rpartition(".")[2]


def list_differences(a: Configurations, b: Configurations) -> list[Difference]:
    """Return the settings of two models that differ, or that may differ. Without a configuration, nothing is known."""
    differences = [
        *_list_unreadable(a, b, a="unreadable", b="readable"),
        *_list_unreadable(b, a, a="readable", b="unreadable"),
    ]
    pairs = _pair(a, b)
    for pair in pairs:
        differences += _compare_in_full(*pair)

    if not pairs and a.by_name and b.by_name:
        settings_a, settings_b = a.merge(), b.merge()
        stated = settings_a.keys() | settings_b.keys()
        # Megatron saves these arguments; a shorter list of another program states nothing about them.
        for settings in (settings_a, settings_b):
            always_saved = _ALWAYS_SAVED.get(str(settings.get("model_type")), frozenset())
            stated -= always_saved - settings.keys()

        differences += _compare(
            "",
            stated & (_KNOWN | _KNOWN_ARGUMENTS),
            (settings_a, settings_a.get("model_type")),
            (settings_b, settings_b.get("model_type")),
        )

    return differences


def _list_unreadable(model: Configurations, other: Configurations, **values: str) -> Iterator[Difference]:
    """Yield a difference for each file without a configuration, if the other model has a configuration."""
    for path in model.unreadable:
        if other.by_name:
            yield Difference(os.path.basename(path), **values)


def _pair(a: Configurations, b: Configurations) -> list[tuple[Configuration, Configuration]]:
    """Return the configurations of both models with one file name and one type of model."""
    pairs = []
    for file_name in sorted(a.by_name.keys() & b.by_name.keys()):
        first, second = a.by_name[file_name], b.by_name[file_name]
        if first.model_type == second.model_type:
            pairs.append((first, second))

    return pairs


def _compare_in_full(a: Configuration, b: Configuration) -> Iterator[Difference]:
    """Yield the settings that may change the function, of two configurations of one type."""
    # An older form of some types has the settings of the language model beside the other settings.
    if TEXT in a.nested.keys() ^ b.nested.keys():
        a, b = a.merge_text(), b.merge_text()

    yield from _compare_part("", a, b)
    for name in sorted(a.nested.keys() & b.nested.keys()):
        yield from _compare_part(name, a, b)
    for name in sorted(a.nested.keys() ^ b.nested.keys()):
        yield Difference(
            name,
            a=_show(name, a.nested),
            b=_show(name, b.nested),
        )


def _compare_part(name: str, a: Configuration, b: Configuration) -> Iterator[Difference]:
    """Yield the settings that differ between nested configurations with a name, or the outer ones without a name."""
    stated_a, stated_b = a.get_stated(name), b.get_stated(name)
    type_a = stated_a.get("model_type", a.model_type)
    type_b = stated_b.get("model_type", b.model_type)
    classes = [configuration.settings.get("architectures") for configuration in (a, b)]
    keys = [key for key in stated_a.keys() | stated_b.keys() if not is_neutral(key, type_a, classes)]
    yield from _compare(
        f"{name}.".lstrip("."),
        keys,
        (a.get_complete(name), type_a),
        (b.get_complete(name), type_b),
    )


def _compare(
    prefix: str, keys: Iterable[str], a: tuple[Mapping[str, Any], object], b: tuple[Mapping[str, Any], object]
) -> Iterator[Difference]:
    """Yield the settings whose values differ, or are not known. a, b: the settings of a model, and its type."""
    for key in sorted(keys):
        values = find_effective(key, *a), find_effective(key, *b)
        is_elsewhere = key in _STATED_ELSEWHERE and None in values
        if not is_elsewhere and not _are_equal(*values):
            yield Difference(
                f"{prefix}{key}",
                a=_show(key, a[0]),
                b=_show(key, b[0]),
            )


def _show(key: str, settings: Mapping[str, Any]) -> Any:
    """Return a setting for a report: null, lists and objects as JSON, None for a setting that the file lacks."""
    if key not in settings:
        return None

    value = settings[key]
    is_plain = isinstance(value, (str, int, float))
    return value if is_plain else json.dumps(value, sort_keys=True)


def _are_equal(value_a: Any, value_b: Any) -> bool:
    """Whether two values of a file are equal; NaN, which Python reads, equals NaN. Unknown values never are."""
    reasons = (
        value_a == value_b,
        repr(value_a) == repr(value_b),
        _is_kind(value_a, value_b),
        _is_kind(value_b, value_a),
    )
    return UNKNOWN not in (value_a, value_b) and any(reasons)


def _is_kind(kind: Any, scaling: Any) -> bool:
    """Whether a configuration states a scaling of positions, and another library its kind only."""
    return isinstance(scaling, dict) and scaling.get("rope_type", "") == kind
