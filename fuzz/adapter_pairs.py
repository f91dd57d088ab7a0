"""A base model with a LoRA adapter as A, and the merged model as B."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

KINDS = ("merged adapter", "adapter with NaN", "NaN in the merged weight", "adapter not merged", "another scale")
_WIDTH = 16
_NAME = "model.layers.0.self_attn.q_proj"


def write(random: Random, kind: str, folder: Path) -> list[str]:
    """Write the two sides to a folder, and return their paths. kind: one of KINDS."""
    rank = random.choice((2, 4))
    alpha = rank * random.choice((1, 2))
    weight = f"{_NAME}.weight"
    base = {weight: torch.randn(_WIDTH, _WIDTH), "model.norm.weight": torch.randn(_WIDTH)}
    first, second = torch.randn(rank, _WIDTH), torch.randn(_WIDTH, rank)
    merged = dict(base)
    # As PEFT merges: W + alpha / r * B @ A.
    scale = alpha / rank
    if kind == "another scale":
        scale *= 1.5
    if kind != "adapter not merged":
        merged[weight] = base[weight] + scale * (second @ first)
    # After the product, so that the merged weight has no NaN.
    if kind == "adapter with NaN":
        _damage(random, first)
    if kind == "NaN in the merged weight":
        _damage(random, merged[weight])
    adapter = {
        f"base_model.model.{_NAME}.lora_A.weight": first,
        f"base_model.model.{_NAME}.lora_B.weight": second,
    }
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    _write_folder(folder / "base", {}, "config.json", base, "model.safetensors")
    _write_folder(folder / "adapter", config, "adapter_config.json", adapter, "adapter_model.safetensors")
    save_file(merged, folder / "merged.safetensors")
    return [f"{folder / 'base'},{folder / 'adapter'}", str(folder / "merged.safetensors")]


def _damage(random: Random, tensor: torch.Tensor) -> None:
    """Put NaN or infinity into an element."""
    element = random.randrange(tensor.numel())
    tensor.view(-1)[element] = random.choice((float("nan"), float("inf")))


def _write_folder(
    folder: Path, config: dict[str, object], config_name: str, tensors: dict[str, torch.Tensor], name: str
) -> None:
    folder.mkdir()
    (folder / config_name).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / name)
