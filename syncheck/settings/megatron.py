"""Translate the arguments that Megatron saves in a checkpoint to settings with the names of transformers.

Names and defaults are those of megatron/training/arguments.py and of `TransformerConfig` in megatron/core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.settings.defaults import MEGATRON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "saved arguments"
# Arguments that other programs do not save.
_MARKS = frozenset("tensor_model_parallel_size make_vocab_size_divisible_by padded_vocab_size".split())
# Arguments with the meaning of a setting of transformers, and the setting.
_NAMES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    "window_size": "sliding_window",
    "moe_router_num_groups": "n_group",
    "moe_router_group_topk": "topk_group",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
# Arguments that change the function, and that have another form in transformers.
_OTHERS = frozenset(
    "add_position_embedding apply_layernorm_1p apply_query_key_layer_scaling apply_residual_connection_post_layernorm "
    "attention_output_gate glu_linear_offset activation_func_clamp_value layernorm_zero_centered_gamma "
    "moe_router_score_function multi_latent_attention mrope_section no_rope_freq normalization "
    "position_embedding_type qk_clip qk_layernorm qk_l2_norm rotary_interleaved rotary_scaling_factor "
    "softmax_scale softmax_type use_rotary_position_embeddings"
    "window_attn_skip_freq".split()
)
# Values of arguments that change nothing.
_OFF: Sequence[Any] = (False, "", [], "softmax")
# The functions of a layer, by the argument that selects them. The last one takes precedence.
_ACTIVATIONS = {
    "bias_gelu_fusion": "gelu_new",
    "swiglu": "silu",
    "quick_geglu": "quick_gelu",
    "squared_relu": "relu2",
    "openai_gelu": "gelu_new",
}


# The name of the constant in the norms of a kind.
_CONSTANTS_OF_NORMS: Mapping[Any, str] = {"RMSNorm": "rms_norm_eps"}


def read_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the arguments of Megatron; empty without them. values: of a checkpoint, by dotted name."""
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        _, is_argument, argument = f".{name}".partition(".args.")
        if not is_argument:
            continue

        # The file of one rank may have other arguments than another file.
        if arguments.setdefault(argument, value) != value:
            arguments[argument] = f"{arguments[argument]} and {value}"

    # The values of a list have names of their own.
    for name in sorted(arguments):
        list_name, is_item, _ = name.partition(".")
        if is_item:
            items = arguments.setdefault(list_name, [])
            items += [arguments[name]] if isinstance(items, list) else []

    return _translate(arguments) if arguments.keys() & _MARKS else {}


def _translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with these arguments."""
    stated = {key: value for key, value in arguments.items() if value is not None}
    settings = {name: stated[key] for key, name in _NAMES.items() if key in stated}
    # An argument that is off has the meaning of a missing one.
    settings |= {f"args.{key}": stated[key] for key in _OTHERS & stated.keys() if stated[key] not in _OFF}
    settings |= _translate_norms(stated)
    settings |= _translate_positions(stated)
    settings |= _translate_experts(stated)
    if stated.get("group_query_attention") and "num_query_groups" in stated:
        settings["num_key_value_heads"] = stated["num_query_groups"]
    if "untie_embeddings_and_output_weights" in stated:
        settings["tie_word_embeddings"] = not stated["untie_embeddings_and_output_weights"]

    # An incomplete list of arguments does not show the function.
    if "swiglu" in stated:
        settings["hidden_act"] = "gelu"
    for argument, activation in _ACTIVATIONS.items():
        if stated.get(argument):
            settings["hidden_act"] = activation

    return {
        **settings,
        "model_type": MEGATRON,
    }


def _translate_norms(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constant in the norms, whose name depends on the kind of the norms."""
    name = _CONSTANTS_OF_NORMS.get(stated.get("normalization"), "layer_norm_eps")
    constants = (
        stated.get("norm_epsilon"),
        stated.get("layernorm_epsilon"),
    )
    settings = {}
    for constant in constants:
        if constant is not None:
            settings[name] = constant

    return settings


def _translate_positions(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions; empty for other positions."""
    if "rotary_base" not in stated or stated.get("position_embedding_type", "rope") != "rope":
        return {}

    settings: dict[str, Any] = {
        "rope_theta": stated["rotary_base"],
        "partial_rotary_factor": stated.get("rotary_percent", 1.0),
        "rope_scaling": None,
    }
    if stated.get("use_rope_scaling"):
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": stated.get("rope_scaling_factor", 8.0),
        }
    if "rotary_seq_len_interpolation_factor" in stated:
        settings["rope_scaling"] = {
            "rope_type": "linear",
            "factor": stated["rotary_seq_len_interpolation_factor"],
        }

    return settings


def _translate_experts(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a router; empty for a model without experts."""
    if not stated.get("num_experts"):
        return {}

    return {
        "num_experts_per_tok": stated.get("moe_router_topk", 2),
        # The softmax of the selected experts has the sum 1.
        "norm_topk_prob": not stated.get("moe_router_pre_softmax"),
    }
