"""Translate the arguments of Megatron in a checkpoint to settings with the names of transformers.

Names and defaults are those of megatron/training/arguments.py and of `TransformerConfig` in megatron/core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck.settings.defaults import MEGATRON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NAME = "saved arguments"
# Arguments saved by Megatron only.
_MARKS = frozenset("tensor_model_parallel_size make_vocab_size_divisible_by padded_vocab_size".split())
# Arguments with the meaning of a setting of transformers, and the setting.
_NAMES = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "kv_channels": "head_dim",
    # The window before a token, and the window after it.
    "window_size.0": "sliding_window",
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
    "softmax_scale softmax_type use_rotary_position_embeddings "
    "window_attn_skip_freq".split()
)
# Values of arguments without an effect.
_OFF: Sequence[Any] = (False, "", [], "softmax")
# The functions of a layer, by the argument that selects them. The last one takes precedence.
_ACTIVATIONS = {
    ("swiglu", False): "gelu",
    ("bias_gelu_fusion", True): "gelu_new",
    ("swiglu", True): "silu",
    ("quick_geglu", True): "quick_gelu",
    ("squared_relu", True): "relu2",
    ("openai_gelu", True): "gelu_new",
}


# The same for the constant in norms, by their kind, with its older name.
_NAMES_OF_NORMS: Mapping[str, Mapping[str, str]] = {
    "RMSNorm": dict.fromkeys(("norm_epsilon", "layernorm_epsilon"), "rms_norm_eps"),
    "LayerNorm": dict.fromkeys(("norm_epsilon", "layernorm_epsilon"), "layer_norm_eps"),
}
# The same for positions, by their kind. Other kinds ignore the arguments.
_NAMES_OF_POSITIONS: Mapping[str, Mapping[str, str]] = {
    "rope": {"rotary_base": "rope_theta", "rotary_percent": "partial_rotary_factor"},
}
# The numbers in Megatron's code for scaled positions (rotary_pos_embedding.py).
_SCALED: Mapping[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


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

    if arguments.keys().isdisjoint(_MARKS):
        return {}

    settings = _translate(arguments)
    # Sizes of the mesh alone, beside which the type of the model says nothing.
    return settings if len(settings) > 1 else {}


def _translate(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with these arguments."""
    stated = {key: value for key, value in arguments.items() if value is not None}
    names = {
        **_NAMES,
        **_NAMES_OF_NORMS.get(str(stated.get("normalization", "LayerNorm")), {}),
        **_NAMES_OF_POSITIONS.get(str(stated.get("position_embedding_type", "rope")), {}),
    }
    settings = {name: stated[key] for key, name in names.items() if key in stated}
    # An argument turned off means the same as a missing argument.
    settings |= {f"args.{key}": stated[key] for key in _OTHERS & stated.keys() if stated[key] not in _OFF}
    settings |= _translate_scaling(stated)
    settings |= _translate_experts(stated)
    if stated.get("group_query_attention"):
        settings["num_key_value_heads"] = stated.get("num_query_groups")
    if "untie_embeddings_and_output_weights" in stated:
        settings["tie_word_embeddings"] = not stated["untie_embeddings_and_output_weights"]

    for (argument, value), activation in _ACTIVATIONS.items():
        if stated.get(argument) == value:
            settings["hidden_act"] = activation

    return {
        **settings,
        "model_type": MEGATRON,
    }


def _translate_scaling(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling of rotary positions; empty without one."""
    settings: dict[str, Any] = {}
    if stated.get("use_rope_scaling"):
        settings["rope_scaling"] = {
            **_SCALED,
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
