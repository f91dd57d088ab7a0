"""A small model with the names of Hugging Face's Llama, in numpy, and its layout in Megatron-Core."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from support.checkpoints import save_safetensors

if TYPE_CHECKING:
    from pathlib import Path

    Weights = dict[str, Any]

HEADS, GROUPS, HEAD, WIDTH, INNER, WORDS, LAYERS = 4, 2, 8, 32, 48, 100, 2
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "hidden_size": WIDTH}


def make_model(seed: int = 0, experts: int = 0) -> Weights:
    """Return random weights; with experts, gate and up projections of each expert."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32)

    weights = {"model.embed_tokens.weight": draw(WORDS, WIDTH), "model.norm.weight": draw(WIDTH)}
    for i in range(LAYERS):
        start = f"model.layers.{i}."
        weights |= {f"{start}self_attn.{x}_proj.weight": draw(HEADS * HEAD, WIDTH) for x in "qo"}
        weights |= {f"{start}self_attn.{x}_proj.weight": draw(GROUPS * HEAD, WIDTH) for x in "kv"}
        weights |= {f"{start}{x}_layernorm.weight": draw(WIDTH) for x in ("input", "post_attention")}
        for prefix in [f"mlp.experts.{e}" for e in range(experts)] or ["mlp"]:
            weights |= {f"{start}{prefix}.{x}_proj.weight": draw(INNER, WIDTH) for x in ("gate", "up")}
            weights[f"{start}{prefix}.down_proj.weight"] = draw(WIDTH, INNER)
    return weights | {"lm_head.weight": draw(WORDS, WIDTH)}


def to_megatron(weights: Weights, groups: int = GROUPS, order: str = "qkv", swap: bool = False) -> Weights:
    """Return the weights with Megatron-Core's names and layout.

    groups: of query, key and value; Megatron-Core has one for each key head. order: of these parts. swap: up before
    gate.
    """
    pad = np.zeros((128 - WORDS, WIDTH), np.float32)
    converted = {
        "embedding.word_embeddings.weight": np.concatenate([weights["model.embed_tokens.weight"], pad]),
        "output_layer.weight": np.concatenate([weights["lm_head.weight"], pad]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    for i in range(LAYERS):
        old, new = f"model.layers.{i}.", f"decoder.layers.{i}."
        parts = [weights[f"{old}self_attn.{x}_proj.weight"].reshape(groups, -1, WIDTH) for x in order]
        gate_up = [weights[f"{old}mlp.{x}_proj.weight"] for x in (("up", "gate") if swap else ("gate", "up"))]
        converted |= {
            f"{new}self_attention.linear_qkv.weight": np.concatenate(parts, 1).reshape(-1, WIDTH),
            f"{new}mlp.linear_fc1.weight": np.concatenate(gate_up),
            f"{new}mlp.linear_fc2.weight": weights[f"{old}mlp.down_proj.weight"],
            f"{new}self_attention.linear_proj.weight": weights[f"{old}self_attn.o_proj.weight"],
            f"{new}input_layernorm.weight": weights[f"{old}input_layernorm.weight"],
            f"{new}pre_mlp_layernorm.weight": weights[f"{old}post_attention_layernorm.weight"],
        }
    return converted


def interleave(rows: Any, head: int = HEAD) -> Any:
    """Return the rows of query or key in the other order for rotary embeddings: halves of each head interleaved."""
    return rows.reshape(-1, 2, head // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(folder: Path, weights: Weights, config: object = None) -> str:
    """Write a folder with a safetensors file, and config.json if there is a configuration; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(folder / "model.safetensors", {name: np.ascontiguousarray(w) for name, w in weights.items()})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)
