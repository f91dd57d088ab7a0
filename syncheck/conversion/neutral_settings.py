"""Settings that do not change the function of a model, and the values of settings that a configuration omits.

Two configurations of one type of model are compared in every setting except the settings of this module. Unknown
settings count, because libraries add settings with every model.

The lists follow the attributes and arguments of `PretrainedConfig` in transformers 4 and 5, and the settings of its
models that act in training or in `generate` only. Transformers writes every attribute of a model's own class, but in
version 4 it omits an attribute of the base class with the default value, and each version has more attributes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from syncheck.conversion.name_maps import is_size

if TYPE_CHECKING:
    from collections.abc import Mapping

# The origin of the model, and the way to load the weights.
_ORIGIN = (
    "_name_or_path architectures auto_map transformers_version _diffusers_version _commit_hash dtype "
    "torch_dtype use_bfloat16 torchscript _attn_implementation _attn_implementation_autoset _experts_implementation "
    "attn_implementation tokenizer_class task_specific_params finetuning_task problem_type id2label label2id prefix "
    "unsloth_version unsloth_fixed transformers.js_config"
)
# The form of the outputs, and the number of parts of a computation.
_OUTPUTS = "use_cache return_dict return_dict_in_generate chunk_size_feed_forward pretraining_tp gradient_checkpointing"
# Initial values and losses, which trained weights do not depend on.
_TRAINING = (
    "initializer_range initializer_factor init_std init_xavier_std router_aux_loss_coef router_z_loss_coef "
    "aux_loss_alpha seq_aux label_smoothing ctc_loss_reduction ctc_zero_infinity apply_spec_augment"
)
# Arguments of `generate`, which transformers 4 stored in the configuration of the model.
_GENERATION = (
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences remove_invalid_values exponential_decay_length_penalty suppress_tokens "
    "begin_suppress_tokens bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id"
)
_NEUTRAL = frozenset(f"{_ORIGIN} {_OUTPUTS} {_TRAINING} {_GENERATION}".split())
# Random masks of training, and the contents of outputs.
_NEUTRAL_NAME = (
    r".*dropout.*|.*(?:pdrop|layerdrop|drop_path_rate|drop_rate)|mask_(?:time|feature)_(?:prob|length|min_masks)"
    r"|output_(?:attentions|hidden_states|scores|router_logits|past)"
)
# Models that count positions from the number of this token.
_COUNT_FROM_PAD = frozenset(
    "roberta xlm-roberta xlm-roberta-xl camembert roberta-prelayernorm data2vec-text longformer led mpnet esm ibert "
    "xmod layoutlmv3 luke mluke markuplm".split()
)

# Settings that the stored tensors contain as sizes, or as tensors: another value does not fit the tensors.
SIZES = frozenset(
    "hidden_size intermediate_size vocab_size head_dim num_hidden_layers num_labels attention_bias mlp_bias qkv_bias "
    "add_cross_attention type_vocab_size num_channels classifier_proj_size".split()
)
# The defaults of all versions of transformers.
_DEFAULTS: Mapping[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "use_mrope": False,
    "use_weighted_layer_sum": False,
    "median_filter_width": 7,
    "pooler_act": "tanh",
    "relative_attention_max_distance": 128,
}
# The same for one type of model.
_ABSOLUTE = {"position_embedding_type": "absolute"}
_DEFAULTS_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    "mixtral": {"router_jitter_noise": 0.0},
    "gemma3_text": {"use_bidirectional_attention": False},
    "vit": {"encoder_stride": 16},
    "albert": _ABSOLUTE,
    "bert": _ABSOLUTE,
    "camembert": _ABSOLUTE,
    "electra": _ABSOLUTE,
    "roberta": _ABSOLUTE,
    "xlm-roberta": _ABSOLUTE,
}
# Settings that are equal to another setting unless the file states both.
_COPIES = {
    "num_key_value_heads": "num_attention_heads",
    "num_decoder_layers": "num_layers",
    "n_ctx": "n_positions",
    "pooler_output_size": "hidden_size",
}
# The last layer of so many layers attends to all positions, unless the configuration states another number.
_FULL_ATTENTION = {"gemma2": 2, "gemma3_text": 6}
_PATTERN = "_sliding_window_pattern"
_MOST_LAYERS = 1024


def is_neutral(key: str, model_type: object) -> bool:
    """Whether a setting does not change the outputs of a model in evaluation."""
    if key == "pad_token_id":
        return str(model_type) not in _COUNT_FROM_PAD

    return key in _NEUTRAL or re.fullmatch(_NEUTRAL_NAME, key) is not None


def get_default(key: str, model_type: object) -> Any:
    """Return the value of a setting that one type of model has by default; None if it is unknown."""
    return _DEFAULTS_OF_TYPE.get(str(model_type), {}).get(key)


def is_default(key: str, value: object, settings: Mapping[str, Any], model_type: object) -> bool:
    """Whether a model has a value by default.

    settings: of the configuration that does not state the key.
    """
    if settings.get(key) is not None:
        return False

    # Older nested configurations do not state their type.
    if key in (*SIZES, "model_type"):
        return True

    if key in _COPIES:
        return value == settings.get(_COPIES[key])

    type_name = str(model_type)
    defaults = {
        **_DEFAULTS,
        **_DEFAULTS_OF_TYPE.get(type_name, {}),
        **_derive_layers(settings, type_name),
    }
    # No default is None.
    return value == defaults.get(key)


def _derive_layers(settings: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Return the kinds of layers that follow from the type of a model; empty for most types."""
    period: Any = settings.get(_PATTERN, _FULL_ATTENTION.get(model_type))
    layers: Any = settings.get("num_hidden_layers")
    if not (is_size(period) and is_size(layers)):
        return {}

    kinds = ["sliding_attention"] * min(layers, _MOST_LAYERS)
    # The last layer of each period.
    for layer in range(period - 1, len(kinds), period):
        kinds[layer] = "full_attention"

    return {
        "layer_types": kinds,
        _PATTERN: period,
    }
