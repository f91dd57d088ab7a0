"""Two files of the size of Llama-3-8B: Hugging Face names against Megatron-Core on 2 x 2 ranks, against `cmp`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.files import GIB, folder
from benchmarks.timing import SYNCHECK, bar, environment, median, peak_anonymous, section, table, take_turns

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 3
LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD, WORDS = 32, 4096, 14336, 32, 8, 128, 128256
# Writes the ranks of Megatron-Core as sparse files: the header of torch.save, and no data.
WRITE = """
import argparse, os, sys, torch
folder, layers, width, inner, heads, groups, head, words = sys.argv[1], *map(int, sys.argv[2:])
names = dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers=layers, hidden_size=width,
             num_attention_heads=heads, num_query_groups=groups, kv_channels=head, swiglu=True,
             expert_model_parallel_size=1, untie_embeddings_and_output_weights=True)
def empty(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)
for tp in range(2):
    for pp in range(2):
        model = {}
        if pp == 0:
            model["embedding.word_embeddings.weight"] = empty(words // 2, width)
        for i in range(layers // 2):
            at = f"decoder.layers.{i}."
            model[at + "input_layernorm.weight"] = empty(width)
            model[at + "self_attention.linear_qkv.weight"] = empty((heads + 2 * groups) * head // 2, width)
            model[at + "self_attention.linear_proj.weight"] = empty(width, heads * head // 2)
            model[at + "pre_mlp_layernorm.weight"] = empty(width)
            model[at + "mlp.linear_fc1.weight"] = empty(inner, width)
            model[at + "mlp.linear_fc2.weight"] = empty(width, inner // 2)
        if pp == 1:
            model["decoder.final_layernorm.weight"] = empty(width)
            model["output_layer.weight"] = empty(words // 2, width)
        where = os.path.join(folder, "iter_0000001", f"mp_rank_{tp:02}_{pp:03}")
        os.makedirs(where)
        with torch.serialization.skip_data():
            torch.save({"model": model, "args": argparse.Namespace(**names), "iteration": 1, "checkpoint_version": 3.0},
                       os.path.join(where, "model_optim_rng.pt"))
"""


def _write_hugging_face(where: Path) -> Path:
    """Write the model with Hugging Face's names as a sparse safetensors file; return its folder."""
    shapes = {
        "model.embed_tokens.weight": (WORDS, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (WORDS, WIDTH),
    }
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes |= {f"{at}{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (GROUPS * HEAD, WIDTH) for x in "kv"}
        shapes |= {f"{at}self_attn.{x}_proj.weight": (HEADS * HEAD, WIDTH) for x in "qo"}
        shapes |= {f"{at}mlp.{x}_proj.weight": (INNER, WIDTH) for x in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (WIDTH, INNER)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    home = where / "hf"
    home.mkdir()
    config = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD, "hidden_size": WIDTH}
    (home / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with (home / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return home


def run(rounds: int) -> tuple[str, bool]:
    """Measure; return a section of RESULTS.md and whether all limits are met."""
    with folder(GIB) as where:
        a = _write_hugging_face(where)
        sizes = map(str, (LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD, WORDS))
        subprocess.run([sys.executable, "-c", WRITE, str(where), *sizes], check=True, env=environment(), timeout=600)
        copy = where / "copy"
        subprocess.run(["cp", "--sparse=always", str(a / "model.safetensors"), str(copy)], check=True)
        command = [SYNCHECK, "diff", "-q", str(a), str(where / "iter_0000001")]
        times = take_turns(
            {
                "cmp of two files of 16 GB": ["cmp", str(a / "model.safetensors"), str(copy)],
                "syncheck diff hf iter_0000001": command,
            },
            rounds,
        )
        cmp, own = median(times).values()
        bars = [
            bar("ratio to cmp of equal bytes", own / cmp, 2.5),
            bar("peak of RssAnon, MB", peak_anonymous(command), 150),
        ]
    return section(
        "A model with the shapes of Llama-3-8B in bfloat16 (16 GB): one safetensors file with the names of Hugging "
        "Face against the files of Megatron-Core with 2 tensor-parallel ranks and 2 pipeline stages. All files are "
        "sparse, so nothing is read from a disk; `cmp` reads two sparse files of the same size.",
        table(times),
        bars,
    )
