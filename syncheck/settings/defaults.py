"""The values that a model has for settings that its configuration does not state, by the type of the model.

Source: the configuration classes of transformers 5 (`AutoConfig.for_model(TYPE)`), whose defaults of these settings are
those of transformers 4. `tests/frameworks/test_defaults_of_settings.py` compares the table with the installed version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

# Stands for an unknown default.
UNKNOWN: Any = object()

# In place of the type of a model, for the settings of other libraries.
META, MEGATRON = "Meta", "Megatron"

# By setting, the types of models with each default. All other known types have no such setting, or null.
_TYPES: Mapping[str, Mapping[Any, str]] = {
    "attention_multiplier": {
        1.0: "granite granitemoe granitemoehybrid granitemoeshared",
    },
    "attn_logit_softcapping": {
        50.0: "gemma2 vaultgemma",
    },
    "embedding_multiplier": {
        1.0: "falcon_h1 granite granitemoe granitemoehybrid granitemoeshared",
    },
    "final_logit_softcapping": {
        30.0: "gemma2 gemma3n_text vaultgemma",
    },
    "head_dim": {
        128: "cohere2 ernie4_5 glm glm4 helium llama4_text qwen3 seed_oss",
        64: "deepseek_v3 gpt_oss longcat_flash mamba2",
        256: "gemma gemma2 gemma3_text gemma3n_text qwen3_next recurrent_gemma vaultgemma",
    },
    "hidden_act": {
        "xielu": "apertus",
        "relu2": "arcee bitnet nemotron persimmon",
        "silu": (
            "aria_text bamba cohere cohere2 deepseek_v2 deepseek_v3 diffllama doge dots1 ernie4_5 ernie4_5_moe "
            "exaone4 falcon_h1 falcon_mamba glm glm4 glm4_moe gpt_oss granite granitemoe granitemoehybrid "
            "granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe llama llama4_text longcat_flash "
            "mamba mamba2 minimax ministral mistral mixtral olmo olmo2 olmo3 olmoe phi3 phi4_multimodal phimoe "
            "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3 stablelm"
        ),
        "gelu": (
            "bart bert camembert electra gpt_neox gpt_neox_japanese mbart roberta whisper xglm xlm-roberta zamba zamba2"
        ),
        "gelu_pytorch_tanh": "gemma gpt_bigcode starcoder2",
        "gelu_new": "codegen gpt2 gpt_neo gptj phi",
        "relu": "opt",
    },
    "hidden_activation": {
        "gelu_pytorch_tanh": "gemma2 gemma3_text gemma3n_text recurrent_gemma vaultgemma",
        "gelu": "modernbert",
    },
    "layer_norm_eps": {
        1e-12: "bert camembert electra roberta xlm-roberta",
        1e-05: (
            "bloom codegen cohere cohere2 falcon falcon_mamba gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese "
            "gptj mamba mamba2 mpt persimmon phi rwkv stablelm"
        ),
        1e-06: "mt5 t5 umt5",
    },
    "logit_scale": {
        0.0625: "cohere cohere2",
    },
    "logits_scaling": {
        1.0: "granite granitemoe granitemoehybrid granitemoeshared",
    },
    "n_group": {
        8: "deepseek_v3",
        1: "dots1 glm4_moe",
    },
    "norm_eps": {
        1e-05: "lfm2 modernbert nemotron",
        1e-06: "xlstm",
    },
    "norm_topk_prob": {
        False: "deepseek_v2 doge dots1 olmoe qwen2_moe qwen3_moe",
        True: "deepseek_v3 glm4_moe qwen3_next",
    },
    "num_experts_per_tok": {
        8: "deepseek_v3 glm4_moe olmoe qwen3_moe",
        64: "doge",
        4: "gpt_oss qwen2_moe",
        2: "granitemoe granitemoehybrid granitemoeshared jamba jetmoe minimax mixtral phimoe",
        1: "llama4_text",
        10: "qwen3_next",
    },
    "num_key_value_heads": {
        8: (
            "bamba falcon_h1 glm4_moe gpt_oss jamba lfm2 llama4_text minimax ministral mistral mixtral "
            "phi4_multimodal phimoe seed_oss"
        ),
        5: "bitnet",
        128: "deepseek_v3",
        32: "dots1 exaone4 qwen2 qwen3 stablelm",
        2: "ernie4_5 gemma3n_text glm glm4 qwen3_next starcoder2",
        4: "ernie4_5_moe gemma2 gemma3_text qwen3_moe smollm3 vaultgemma",
        16: "gemma jetmoe qwen2_moe zamba",
        1: "gpt_bigcode",
        20: "helium",
    },
    "parallel_attn": {
        True: "falcon",
    },
    "partial_rotary_factor": {
        0.5: "bamba glm glm4 glm4_moe nemotron persimmon phi recurrent_gemma",
        0.25: "gpt_neox qwen3_next stablelm",
        1.0: "gpt_neox_japanese phi3 phi4_multimodal",
        0.9: "moonshine",
    },
    "query_pre_attn_scalar": {
        256: "gemma2 gemma3_text vaultgemma",
    },
    "residual_multiplier": {
        1.0: "granite granitemoe granitemoehybrid granitemoeshared",
    },
    "rms_norm_eps": {
        1e-05: (
            "apertus arcee bamba bitnet diffllama ernie4_5 ernie4_5_moe exaone4 falcon_h1 glm4_moe gpt_oss "
            "hunyuan_v1_dense hunyuan_v1_moe llama4_text longcat_flash minimax mixtral olmo2 olmo3 olmoe phi3 "
            "phi4_multimodal phimoe zamba zamba2"
        ),
        1e-06: (
            "aria_text deepseek_v2 deepseek_v3 doge dots1 gemma gemma2 gemma3_text gemma3n_text granite "
            "granitemoe granitemoehybrid granitemoeshared jamba jetmoe llama ministral mistral qwen2 qwen2_moe "
            "qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 vaultgemma"
        ),
        1.5625e-07: "glm glm4",
        1e-08: "helium",
    },
    "rope_theta": {
        12000000.0: "apertus",
        10000.0: (
            "arcee aria_text bamba cohere2 deepseek_v2 deepseek_v3 diffllama doge dots1 exaone4 falcon falcon_h1 "
            "gemma gemma2 glm glm4 glm4_moe gpt_neox gpt_neox_japanese granite granitemoe granitemoehybrid "
            "granitemoeshared hunyuan_v1_dense hunyuan_v1_moe jetmoe llama ministral mistral moonshine nemotron "
            "olmo olmo2 olmoe persimmon phi phi3 phi4_multimodal qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next "
            "recurrent_gemma seed_oss stablelm starcoder2 vaultgemma zamba2"
        ),
        500000.0: "bitnet cohere ernie4_5 ernie4_5_moe llama4_text",
        150000.0: "gpt_oss",
        100000.0: "helium",
        1000000.0: "lfm2 minimax mixtral phimoe",
        10000000.0: "longcat_flash",
        2000000.0: "smollm3",
    },
    "rotary_dim": {
        64: "codegen gptj",
    },
    "routed_scaling_factor": {
        1.0: "deepseek_v2 dots1 glm4_moe",
        2.5: "deepseek_v3",
        6.0: "longcat_flash",
    },
    "scale_attn_weights": {
        True: "gpt2 gpt_bigcode",
    },
    "sliding_window": {
        4096: (
            "cohere2 dots1 exaone4 gemma2 gemma3_text ministral mistral olmo3 qwen2 qwen2_moe qwen3 qwen3_moe "
            "vaultgemma"
        ),
        512: "gemma3n_text",
        128: "gpt_oss",
    },
    "tie_word_embeddings": {
        False: (
            "apertus arcee aria_text bamba bitnet codegen deepseek_v2 deepseek_v3 diffllama doge dots1 exaone4 "
            "falcon_h1 glm glm4 glm4_moe gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid "
            "granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe jamba llama llama4 llama4_text llava "
            "llava_next longcat_flash mamba2 minimax ministral mistral mixtral nemotron olmo olmo2 olmo3 olmoe "
            "persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe "
            "qwen3_next qwen3_vl rwkv seed_oss stablelm xlstm"
        ),
        True: (
            "bart bert bloom camembert cohere cohere2 distilbert electra ernie4_5 ernie4_5_moe falcon "
            "falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n_text gpt2 gpt_bigcode gpt_neo gpt_neox_japanese "
            "jetmoe lfm2 mamba mbart mistral3 modernbert moonshine mpt mt5 opt paligemma recurrent_gemma roberta "
            "smollm3 starcoder2 t5 t5gemma umt5 vaultgemma whisper xglm xlm-roberta zamba zamba2"
        ),
    },
    "topk_group": {
        4: "deepseek_v3",
        1: "dots1 glm4_moe",
    },
    "topk_method": {
        "greedy": "deepseek_v2",
    },
    "use_parallel_residual": {
        True: "gpt_neox",
        False: "stablelm",
    },
    "use_sliding_window": {
        False: "qwen2 qwen2_moe qwen3 qwen3_moe smollm3",
    },
}
_BOTH_TIES = _TYPES["tie_word_embeddings"].values()
KNOWN_TYPES = frozenset(" ".join(_BOTH_TIES).split())
# Types with a default that is a table, or that is another one in transformers 4.
_UNKNOWN_DEFAULTS = {
    "rope_scaling": frozenset("apertus gpt_oss".split()),
    "rope_theta": frozenset("gemma3_text gemma3n_text modernbert olmo3".split()),
    "num_key_value_heads": frozenset({"gpt_bigcode"}),
    "position_embedding_type": KNOWN_TYPES,
    "sliding_window": frozenset({"modernbert"}),
}
# Settings that are null in every class that has them, or whose absence means the value of another setting.
_NULL = frozenset(
    "rope_scaling rope_parameters quantization_config layer_types no_rope_layers mlp_only_layers mlp_layer_types "
    "layers_block_type n_inner clip_qkv attention_types summary_proj cross_attention_hidden_size embedding_scale "
    "word_embed_proj_dim pooler_output_size problem_type id2label label2id attn_config num_kv_heads swiglu_limits "
    "_sliding_window_pattern n_ctx num_key_value_heads num_decoder_layers".split()
)


def _list_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults by setting and type."""
    defaults = {key: dict[str, Any].fromkeys(KNOWN_TYPES) for key in _TYPES}
    for key, types_by_value in _TYPES.items():
        for value, types in types_by_value.items():
            defaults[key] |= dict.fromkeys(types.split(), value)

    for key, unknown_types in _UNKNOWN_DEFAULTS.items():
        defaults.setdefault(key, {}).update(dict.fromkeys(unknown_types, UNKNOWN))

    return defaults


_DEFAULTS = _list_defaults()
# The defaults of all other types.
_DEFAULTS_OF_OTHERS = dict.fromkeys(_NULL)


def find_default(key: str, model_type: object) -> Any:
    """Return the default of a setting, None for a setting that is null or that the type lacks; UNKNOWN if not known."""
    of_others = _DEFAULTS_OF_OTHERS.get(key, UNKNOWN)
    return _DEFAULTS.get(key, {}).get(str(model_type), of_others)
