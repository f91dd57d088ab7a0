"""Two models for each finding of `syncheck diff`: B is A with one mistake of a conversion. Needs numpy only.

The models are random Llamas of two layers, as folders with config.json and model.safetensors.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Arrays = dict[str, np.ndarray]

HIDDEN, HEADS, MIDDLE, WORDS, EXPERTS = 32, 4, 48, 40, 3
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
LAYER = "model.layers.{}."


def make_model(seed: int) -> Arrays:
    """Return the weights of a model, by name."""
    random = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    arrays = {"model.embed_tokens.weight": draw(WORDS, HIDDEN)}
    for layer in range(2):
        start = LAYER.format(layer)
        arrays |= {f"{start}self_attn.{name}_proj.weight": draw(HIDDEN, HIDDEN) for name in "qkvo"}
        arrays |= {f"{start}mlp.{name}_proj.weight": draw(MIDDLE, HIDDEN) for name in ("gate", "up")}
        arrays[f"{start}mlp.down_proj.weight"] = draw(HIDDEN, MIDDLE)
        arrays |= {f"{start}{name}_layernorm.weight": draw(HIDDEN) for name in ("input", "post_attention")}
    return arrays | {"model.norm.weight": draw(HIDDEN), "lm_head.weight": draw(WORDS, HIDDEN)}


def save(folder: Path, arrays: Arrays) -> None:
    """Write a Hugging Face folder."""
    folder.mkdir()
    header, start = {}, 0
    for name, array in arrays.items():
        end = start + array.nbytes
        header[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}), encoding="utf-8")


def _changed(arrays: Arrays, ending: str, change: Callable[[np.ndarray], np.ndarray]) -> Arrays:
    return {name: change(array) if name.endswith(ending) else array for name, array in arrays.items()}


def _fused(arrays: Arrays, first: str, second: str) -> Arrays:
    """Return the arrays with two projections in one tensor, in this order."""
    made = {name: array for name, array in arrays.items() if "gate_proj" not in name and "up_proj" not in name}
    for layer in range(2):
        start = f"{LAYER.format(layer)}mlp."
        parts = [arrays[f"{start}{name}_proj.weight"] for name in (first, second)]
        made[f"{start}gate_up_proj.weight"] = np.concatenate(parts)
    return made


def _interleave(rows: np.ndarray) -> np.ndarray:
    """Return the rows of each head with its halves interleaved, as in Meta's code for rotary embeddings."""
    return rows.reshape(HEADS, 2, HIDDEN // HEADS // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _quantize(arrays: Arrays) -> Arrays:
    """Return the projections as int8 with a scale for each row."""
    made = {}
    for name, array in arrays.items():
        if not name.endswith("_proj.weight"):
            made[name] = array
            continue
        scale = (np.abs(array).max(1, keepdims=True) / 127).astype(np.float32)
        made |= {name: np.round(array / scale).astype(np.int8), f"{name}_scale": scale}
    return made


def _exchange(arrays: Arrays, one: str, other: str) -> Arrays:
    names = {name: name.replace(one, other) if one in name else name.replace(other, one) for name in arrays}
    return {name: arrays[names[name]] for name in arrays}


def _with_experts(arrays: Arrays) -> Arrays:
    """Return a mixture of experts instead of the MLPs."""
    random = np.random.default_rng(9)
    made = {name: array for name, array in arrays.items() if ".mlp." not in name}
    for layer in range(2):
        for expert in range(EXPERTS):
            start = f"{LAYER.format(layer)}block_sparse_moe.experts.{expert}."
            made |= {
                f"{start}{w}.weight": random.standard_normal((16, HIDDEN)).astype(np.float32) for w in ("w1", "w3")
            }
    return made


def make_pairs() -> dict[str, tuple[str, Arrays, Arrays]]:
    """Return for each code of a finding a sentence on B, and the two models."""
    a, old = make_model(0), make_model(1)
    experts = _with_experts(a)
    late = {name: old[name] if name.startswith(LAYER.format(1)) else array for name, array in a.items()}
    noise = np.random.default_rng(3).standard_normal((HIDDEN, MIDDLE)).astype(np.float32)
    return {
        "SYN301": ("B is the model before the update.", a, old),
        "SYN302": ("The update of layer 1 was not delivered.", a, late),
        "SYN304": ("The output projection of layer 0 is transposed.", a,
                   _changed(a, "0.self_attn.o_proj.weight", np.transpose)),
        "SYN305": ("Gate and up are exchanged in the fused tensor.", a, _fused(a, "up", "gate")),
        "SYN306": ("The rows of queries and keys are in Meta's order.", a,
                   _changed(_changed(a, "q_proj.weight", _interleave), "k_proj.weight", _interleave)),
        "SYN307": ("B is stored in bfloat16.", a,
                   {name: array.astype(ml_dtypes.bfloat16) for name, array in a.items()}),
        "SYN308": ("The projections of B are int8 with a scale for each row.", a, _quantize(a)),
        "SYN309": ("The vocabulary of B is padded to 48 rows.", a,
                   _changed(_changed(a, "lm_head.weight", _pad), "embed_tokens.weight", _pad)),
        "SYN310": ("Two experts of each layer are exchanged.", experts, _exchange(experts, "experts.0.", "experts.2.")),
        "SYN311": ("The last layer of B was initialized again.", a, {**a, "lm_head.weight": old["lm_head.weight"]}),
        "SYN312": ("The embedding of B is multiplied by the square root of its size.", a,
                   _changed(a, "embed_tokens.weight", lambda array: array * np.float32(HIDDEN**0.5))),
        "SYN313": ("The layers of B are exchanged.", a, _exchange(a, "layers.0.", "layers.1.")),
        "SYN314": ("B ties its output layer with the embedding, and A has an output layer of its own.", a,
                   {**a, "lm_head.weight": a["model.embed_tokens.weight"]}),
        "SYN315": ("The norms of B multiply by 1 plus their weight.", a,
                   _changed(a, "norm.weight", lambda array: array - np.float32(1))),
        "SYN316": ("The projections of B are stored numbers of 8 bits, without the scale of each row.", _quantize(a),
                   _without_scales(_quantize(a))),
        "SYN317": ("The key heads of B are repeated for a library without grouped-query attention.", a,
                   _changed(a, "k_proj.weight", _repeat)),
        "SYN318": ("The vocabulary of B was cut to the number of another tokenizer.", a,
                   _changed(_changed(a, "lm_head.weight", _cut), "embed_tokens.weight", _cut)),
        "SYN399": ("A projection of B contains noise.", a,
                   _changed(a, "0.mlp.down_proj.weight", lambda array: array + noise / 10)),
    }  # fmt: skip


def _without_scales(arrays: Arrays) -> Arrays:
    """Return the stored numbers as floats, and no scales."""
    return {name: array.astype(np.float32) for name, array in arrays.items() if not name.endswith("_scale")}


def _repeat(rows: np.ndarray) -> np.ndarray:
    """Return the rows with each head twice."""
    return rows.reshape(HEADS, -1, HIDDEN).repeat(2, 0).reshape(-1, HIDDEN)


def _cut(array: np.ndarray) -> np.ndarray:
    """Return the rows without the last four."""
    return array[: WORDS - 4]


def _pad(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array, np.zeros((48 - WORDS, HIDDEN), np.float32)])
