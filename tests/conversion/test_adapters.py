"""LoRA adapters: a merge is proven within rounding, and missing or wrong merges are named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.listings import find_texts, list_names
from support.states import cast, replace_in_names

import syncheck
from syncheck.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

RANK, ALPHA = 4, 8
MODULES = [f"model.layers.{i}.{part}" for i in range(llama.LAYERS) for part in ("self_attn.q_proj", "mlp.down_proj")]


def make_adapter(model: Weights, *, seed: int = 1, turned: bool = False) -> Weights:
    """Return the two factors of each module, with PEFT's names."""
    rng = np.random.default_rng(seed)
    adapter = {}
    for module in MODULES:
        rows, columns = model[f"{module}.weight"].shape[:: -1 if turned else 1]
        name = f"base_model.model.{module}"
        adapter[f"{name}.lora_A.weight"] = rng.standard_normal((RANK, columns), np.float32)
        adapter[f"{name}.lora_B.weight"] = rng.standard_normal((rows, RANK), np.float32) * np.float32(0.1)
    return adapter


def merge(model: Weights, adapter: Weights, scale: float = ALPHA / RANK, *, turned: bool = False) -> Weights:
    """Return the merged model, computed as PEFT does: in float32, the product before the sum."""
    merged = dict(model)
    for module in MODULES:
        name = f"base_model.model.{module}"
        product = (adapter[f"{name}.lora_B.weight"] @ adapter[f"{name}.lora_A.weight"]) * np.float32(scale)
        merged[f"{module}.weight"] = model[f"{module}.weight"] + (product.T if turned else product)
    return merged


def compare(tmp_path: Path, model: Weights, adapter: Weights, b: Weights, **config: Any) -> syncheck.Report:
    """Compare a base model and its adapter with another model."""
    base, copy = llama.write(tmp_path / "base", model), llama.write(tmp_path / "b", b)
    folder = tmp_path / "adapter"
    llama.write(folder, adapter)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    if config.pop("config", True):
        names = list_targets(adapter)
        settings = {"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA", "target_modules": names, **config}
        text = json.dumps(settings)
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    return syncheck.diff(f"{base},{folder}", copy)


def list_targets(adapter: Weights) -> list[str]:
    """Return the last segments of the modules with factors."""
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter if ".lora_" in name}
    return sorted(modules)


def codes(report: syncheck.Report) -> dict[str, int]:
    """Return the number of tensors of each finding."""
    return {finding.code: len(finding.tensors) for finding in report.groups[-1].findings}


@pytest.mark.parametrize("turned", [False, True])
def test_a_merge_is_close(tmp_path: Path, turned: bool) -> None:
    """All merged tensors agree within rounding, and all other tensors bit by bit."""
    model = llama.make_model()
    adapter = make_adapter(model, turned=turned)
    merged = merge(model, adapter, turned=turned)
    report = compare(tmp_path, model, adapter, merged, fan_in_fan_out=turned)
    assert report.exit_code == 0
    assert report.counts.identical + report.counts.close == len(model)
    assert report.counts.close <= len(MODULES)


def test_rank_stabilized_and_patterns(tmp_path: Path) -> None:
    """The scale is alpha / sqrt(r) for rank-stabilized LoRA, and patterns replace alpha."""
    model = llama.make_model()
    adapter = make_adapter(model)
    merged = merge(model, adapter, ALPHA / RANK**0.5)
    assert compare(tmp_path / "1", model, adapter, merged, use_rslora=True).exit_code == 0
    merged = merge(model, adapter, 1.0)
    assert compare(tmp_path / "2", model, adapter, merged, alpha_pattern={"q_proj": 4, "down_proj": 4}).exit_code == 0
    assert compare(tmp_path / "3", model, adapter, merged).exit_code == 1


@pytest.mark.parametrize("count", [1, len(MODULES)])
def test_unmerged_modules(tmp_path: Path, count: int) -> None:
    """Modules that still equal the base model."""
    model = llama.make_model()
    adapter = make_adapter(model)
    merged = merge(model, adapter) | {f"{m}.weight": model[f"{m}.weight"] for m in MODULES[:count]}
    report = compare(tmp_path, model, adapter, merged)
    assert codes(report) == {"SYN303": count}


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0])
def test_a_wrong_scale(tmp_path: Path, factor: float) -> None:
    """A merge with another scale contains another multiple of the product."""
    model = llama.make_model()
    adapter = make_adapter(model)
    report = compare(tmp_path, model, adapter, merge(model, adapter, factor * ALPHA / RANK))
    assert codes(report) == {"SYN303": len(MODULES)}
    relation = report.groups[-1].tensors[0].evidence.relation  # type: ignore[union-attr]
    assert relation is not None
    assert relation.parameters["factor"] == pytest.approx(factor, rel=0.01)


def test_another_adapter(tmp_path: Path) -> None:
    """A merge of another adapter is not explained."""
    model = llama.make_model()
    report = compare(tmp_path, model, make_adapter(model), merge(model, make_adapter(model, seed=2)))
    assert codes(report) == {"SYN399": len(MODULES)}


def to_bfloat16(weights: Weights) -> Weights:
    """Round the weights."""
    import ml_dtypes

    return cast(weights, ml_dtypes.bfloat16)


def test_bfloat16(tmp_path: Path) -> None:
    """Rounding hides single elements of a small adapter, but not the adapter: an unmerged weight is never close."""
    model = to_bfloat16(llama.make_model())
    wide = cast(model, np.float32)
    adapter = make_adapter(model)
    for name in find_texts(adapter, "lora_B"):
        adapter[name] = adapter[name] * np.float32(0.02)
    report = compare(tmp_path / "1", model, adapter, to_bfloat16(merge(wide, adapter)))
    assert (report.exit_code, codes(report)) == (0, {})
    report = compare(tmp_path / "2", model, adapter, model)
    assert codes(report) == {"SYN303": len(MODULES)}
    half = to_bfloat16(merge(wide, adapter, 0.5 * ALPHA / RANK))
    assert compare(tmp_path / "3", model, adapter, half).exit_code == 1


@pytest.mark.parametrize("config", [{"config": False}, {"use_dora": True}])
def test_adapters_that_are_not_understood(tmp_path: Path, config: dict[str, Any]) -> None:
    """Without a scale, or with another formula, weights that differ are not compared, and no part is ignored."""
    model = llama.make_model()
    adapter = make_adapter(model)
    report = compare(tmp_path, model, adapter, merge(model, adapter), **config)
    assert report.verdict == "undecided"
    assert report.counts.not_compared == len(MODULES) + len(adapter)
    assert set(list_names(report.groups[-1].tensors)) >= adapter.keys()


def test_names_of_a_model_in_memory(tmp_path: Path) -> None:
    """The state dict of a PeftModel has base and adapter in one file; saved modules replace those of the base."""
    model = llama.make_model()
    adapter = make_adapter(model)
    merged = merge(model, adapter)
    adapted = {f"{module}.weight" for module in MODULES}
    head = np.random.default_rng(3).standard_normal(model["lm_head.weight"].shape, np.float32)
    state = {
        f"base_model.model.{name.replace('.weight', '.base_layer.weight') if name in adapted else name}": w
        for name, w in model.items()
        if name != "lm_head.weight"
    }
    state["base_model.model.lm_head.original_module.weight"] = model["lm_head.weight"]
    state["base_model.model.lm_head.modules_to_save.default.weight"] = head
    state |= replace_in_names(adapter, ".weight", ".default.weight")
    a = llama.write(tmp_path / "a", state)
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(settings))
    b = llama.write(tmp_path / "b", {**merged, "lm_head.weight": head})
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert (report.exit_code, report.counts.not_compared) == (0, 0)


def test_two_adapters_are_compared_as_stored(tmp_path: Path) -> None:
    """Factors that differ while their product agrees are a difference."""
    model = llama.make_model()
    adapter = make_adapter(model)
    second = {name: w * 2 if "lora_A" in name else w / 2 for name, w in adapter.items()}
    a, b = llama.write(tmp_path / "a", {**model, **adapter}), llama.write(tmp_path / "b", {**model, **second})
    assert syncheck.diff(a, a).exit_code == 0
    assert syncheck.diff(a, b).counts.different == len(adapter)


def test_files_whose_names_differ_by_a_prefix_are_copies(tmp_path: Path) -> None:
    """Two files of A with other prefixes hold the same tensors: their difference is reported."""
    model = llama.make_model()
    wrapped = {f"module.{name}": w + 1 for name, w in model.items()}
    first_path, second_path = llama.write(tmp_path / "1", model), llama.write(tmp_path / "2", wrapped)
    assert syncheck.diff(f"{first_path},{second_path}", first_path).exit_code == 1


@pytest.mark.parametrize("other", ["other data", "another scale", "equal"])
def test_two_adapters_of_one_side(tmp_path: Path, other: str) -> None:
    """Two adapters of one module are an error; equal adapters, like the copies of two ranks, are accepted."""
    model = llama.make_model()
    adapter = make_adapter(model)
    assert compare(tmp_path, model, adapter, merge(model, adapter)).exit_code == 0
    second = make_adapter(model, seed=5) if other == "other data" else adapter
    scale = {"lora_alpha": 2 * ALPHA} if other == "another scale" else {}
    compare(tmp_path / "second", model, second, model, **scale)
    sides = [tmp_path / "base", tmp_path / "adapter", tmp_path / "second" / "adapter"], tmp_path / "b"
    if other == "equal":
        assert syncheck.diff(*sides).exit_code == 0
    else:
        with pytest.raises(UsageError):
            syncheck.diff(*sides)


def test_another_scale_is_no_missing_merge(tmp_path: Path) -> None:
    """The cause of a merge with another scale is not that of weights without the product."""
    model = llama.make_model()
    adapter = make_adapter(model)
    causes = []
    for scale in (0.25, 0.0):
        (tmp_path / str(scale)).mkdir()
        report = compare(tmp_path / str(scale), model, adapter, merge(model, adapter, scale))
        assert codes(report) == {"SYN303": len(MODULES)}
        causes.append(report.groups[-1].findings[0].cause.code.name)
    assert causes == ["CAUSE_SCALE", "CAUSE"]
