"""Adapters of PEFT: patterns match as in PEFT, and merges of PEFT are proven."""

from __future__ import annotations

import json
import random
import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from support.libraries import need
from support.listings import find_all, list_codes, list_names
from support.states import copy_values

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
        save_file(copy_values(model.state_dict()), tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    model = make_model().to(getattr(torch, dtype))
    base = save(model, "base")
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, **CONFIGS[kind]))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    memory = copy_values(adapted.state_dict())
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
    assert set(list_codes(report.groups[-1].findings)) == {"SYN303"}
    with torch.no_grad():
        merged.layers[1]["q"].weight[2, 3] *= 1.05
    assert syncheck.diff(sides[0], save(merged, "changed")).exit_code == 1


EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "one name": {"target_modules": ["v"]},
    "ends of names": {"target_modules": ["0.q", "layers.1.v"]},
    "part of a segment": {"target_modules": ["v", "onv"]},
    "excluded name": {"exclude_modules": ["v"]},
    "excluded expression": {"exclude_modules": r".*\.1\.\w"},
    "expression": {"target_modules": r"layers\.\d\.(q|v)"},
    "end of a name as an expression": {"target_modules": "q|conv"},
    "all linear layers": {"target_modules": "all-linear", "exclude_modules": ["head"]},
    "all linear layers of some": {"target_modules": "all-linear", "layers_to_transform": [1]},
    "layer": {"layers_to_transform": 1},
    "layers of a list": {"target_modules": ["q", "v", "conv"], "layers_to_transform": [0], "layers_pattern": "layers"},
    "layers of two lists": {"layers_to_transform": [0], "layers_pattern": ["h", "l[a-y]+s"]},
    "layers of another list": {"layers_to_transform": [0, 1], "layers_pattern": ["h"]},
    "whole names in any layer": {"target_modules": ["layers.0.q", "v"], "layers_to_transform": [1]},
    "pattern without layers": {"layers_pattern": "layers"},
    "saved segment": {"modules_to_save": ["lay"]},
    "saved expression": {"modules_to_save": ["(layer|conv)s?.1"]},
    "no names": {"target_modules": []},
    "no biases": {"lora_bias": False},
}


def load_edited(folder: Path, edit: dict[str, Any]) -> dict[str, Any] | None:
    """Edit adapter_config.json, and return the model that PEFT merges; None if PEFT refuses the settings."""
    from peft import PeftModel

    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | edit))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            adapted = PeftModel.from_pretrained(make_model(), str(folder))
        except (ValueError, KeyError, TypeError):
            return None
    return copy_values(adapted.merge_and_unload().state_dict())


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_factors_that_peft_does_not_load(tmp_path: Path, edit: dict[str, Any]) -> None:
    """Exactly the weights that PEFT merges with edited settings are merged; all other factors are undecided."""
    need("peft")
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    def save(tensors: dict[str, Any], name: str) -> str:
        (tmp_path / name).mkdir()
        save_file(copy_values(tensors), tmp_path / name / "model.safetensors")
        return str(tmp_path / name)

    stored_values = make_model().state_dict()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["q", "v", "conv"], lora_bias=True)
    adapted = get_peft_model(make_model(), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_B." in name:
                parameter.add_(torch.randn_like(parameter))
    adapted.save_pretrained(tmp_path / "adapter")
    full = adapted.merge_and_unload().state_dict()
    merged = load_edited(tmp_path / "adapter", edit)
    changed = {name for name in stored_values if merged and not torch.equal(merged[name], stored_values[name])}
    lost = {name for name in stored_values if not torch.equal(full[name], stored_values[name])} - changed
    report = syncheck.diff([save(stored_values, "base"), tmp_path / "adapter"], save(full, "full"))
    uncompared = set(list_names(find_all(report.groups[-1].tensors, uncompared=True)))
    assert (report.exit_code, uncompared & stored_values.keys()) == (2 if lost else 0, lost)
    if merged is not None:
        assert syncheck.diff([tmp_path / "base", tmp_path / "adapter"], save(merged, "b")).exit_code == 2 * bool(lost)


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
        save_file(copy_values(model.state_dict()), folder / "base" / "model.safetensors")
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter))
        adapted.save_pretrained(folder / "adapter")
        merged = copy_values(adapted.merge_and_unload().state_dict())
        save_file(merged, folder / "merged" / "model.safetensors")
        assert syncheck.diff([folder / "base", folder / "adapter"], folder / "merged").exit_code == 2, name
