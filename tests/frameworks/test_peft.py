"""Adapters of PEFT: patterns match as in PEFT, and merges of PEFT are proven."""

from __future__ import annotations

import random
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from libraries import need

import syncheck
from syncheck.conversion.patterns import Budget, UnsupportedPatternError, find_pattern

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
TOKENS = (
    r"model layers encoder.layer self_attn [qkv]_proj (q|v)_proj mlp \. .* . \d+ [0-9]+ 0 1 1[0-9] (0|1|11) "
    r"(?:mlp|attn) \.layers\. \w+ ^ ^model $ .*? .+ {1,2} x? down_proj experts"
).split()
PARTS = (
    "model layers encoder layer self_attn attn q_proj k_proj v_proj mlp down_proj experts 0 1 11 12 module x".split()
)


def test_patterns_match_as_in_peft() -> None:
    """Random patterns and names of modules have the result of PEFT's own function."""
    need("peft")
    from peft.utils.other import get_pattern_key

    draw = random.Random(2)
    compared, matching = 0, 0
    for _ in range(15_000):
        patterns = ["".join(draw.choices(TOKENS, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))]
        name = ".".join(draw.choices(PARTS, k=draw.randint(1, 6)))
        try:
            pattern = find_pattern(patterns, name, Budget())
        except UnsupportedPatternError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                expected = get_pattern_key(patterns, name)
            except re.error:
                pytest.fail(f"PEFT refuses {patterns}")
        # PEFT returns the name without a match.
        assert (name if pattern is None else pattern) == expected, (patterns, name)
        compared, matching = compared + 1, matching + (pattern is not None)
    assert compared > 6000
    assert matching > 300


def make_model() -> Any:
    """Return a small model with every kind of layer that PEFT merges."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed_tokens = nn.Embedding(20, 8)
            self.layers = nn.ModuleList([nn.ModuleDict({"q": nn.Linear(8, 8), "v": nn.Linear(8, 4)}) for _ in range(2)])
            self.conv, self.norm, self.head = nn.Conv2d(8, 6, 3), nn.LayerNorm(8), nn.Linear(8, 20, bias=False)

        def get_input_embeddings(self) -> nn.Module:
            return self.embed_tokens

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    return Model()


CONFIGS: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q", "v"]},
    "patterns": {
        "target_modules": ["q", "v", "conv"],
        "rank_pattern": {r"layers\.1\..*": 3, "conv": 2},
        "alpha_pattern": {r".*\.1\.q": 32, r"^layers\.\d\.v": 3},
    },
    "rank-stabilized with biases": {
        "target_modules": ["q", "conv"],
        "use_rslora": True,
        "lora_bias": True,
        "bias": "all",
    },
    "replaced": {"target_modules": ["q"], "modules_to_save": ["head", "norm"]},
    "tokens": {"target_modules": ["v"], "trainable_token_indices": {"embed_tokens": [7, 3, 11]}},
    "embedding": {"target_modules": ["q", "embed_tokens"]},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_merges_of_peft_are_proven(tmp_path: Path, kind: str, dtype: str) -> None:
    """A merge of PEFT is in sync, one element of it that differs is not, and neither is the base model."""
    need("peft")
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    def save(model: Any, name: str) -> str:
        (tmp_path / name).mkdir()
        save_file({key: w.clone() for key, w in model.state_dict().items()}, tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    model = make_model().to(getattr(torch, dtype))
    base = save(model, "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **CONFIGS[kind]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    memory = {key: w.clone() for key, w in adapted.state_dict().items()}
    (tmp_path / "memory").mkdir()
    save_file(memory, tmp_path / "memory" / "model.safetensors")
    settings = (tmp_path / "adapter" / "adapter_config.json").read_text()
    (tmp_path / "memory" / "adapter_config.json").write_text(settings)
    merged = adapted.merge_and_unload()
    sides = [base, str(tmp_path / "adapter")], save(merged, "merged")
    report = syncheck.diff(*sides)
    assert (report.exit_code, report.counts.not_compared) == (0, 0)
    report = syncheck.diff(tmp_path / "memory", sides[1])
    assert (report.exit_code, report.counts.not_compared) == (0, 0)
    report = syncheck.diff(sides[0], base)
    assert {finding.code for finding in report.groups[-1].findings} == {"SYN303"}
    with torch.no_grad():
        merged.layers[1]["q"].weight[2, 3] *= 1.05
    assert syncheck.diff(sides[0], save(merged, "changed")).exit_code == 1


def test_other_tuners_are_undecided(tmp_path: Path) -> None:
    """A correct merge of another kind of adapter is undecided."""
    need("peft")
    import torch
    from peft import HRAConfig, IA3Config, LNTuningConfig, LoHaConfig, LoraConfig, VeraConfig, get_peft_model
    from safetensors.torch import save_file

    tuners = {
        "ia3": IA3Config(target_modules=["q"], feedforward_modules=["q"]),
        "loha": LoHaConfig(r=4, target_modules=["q"]),
        "vera": VeraConfig(r=4, target_modules=["q"]),
        "hra": HRAConfig(r=4, target_modules=["q"]),
        "norms": LNTuningConfig(target_modules=["norm"]),
        "dora": LoraConfig(r=4, target_modules=["q"], use_dora=True),
    }
    for name, config in tuners.items():
        folder = tmp_path / name
        model = make_model()
        for part in ("base", "merged"):
            (folder / part).mkdir(parents=True)
        save_file({key: w.clone() for key, w in model.state_dict().items()}, folder / "base" / "model.safetensors")
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        adapted.save_pretrained(folder / "adapter")
        merged = {key: w.clone() for key, w in adapted.merge_and_unload().state_dict().items()}
        save_file(merged, folder / "merged" / "model.safetensors")
        assert syncheck.diff([folder / "base", folder / "adapter"], folder / "merged").exit_code == 2, name
