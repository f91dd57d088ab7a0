"""A map applies to files whose names lack the prefix of the base model, on one side or on both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama

import syncheck
from syncheck.conversion.map_files import read_map, write_map
from syncheck.errors import UsageError
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

GPT2 = DiffOptions(map="gpt2")
RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    """Return random weights."""
    return RNG.standard_normal(shape, np.float32)


def make_gpt2() -> llama.Weights:
    """Return a GPT-2 of three layers with inputs first and square projections, without prefix."""
    model = {"wte.weight": draw(20, 16), "ln_f.weight": draw(16)}
    for i in range(3):
        model |= {f"h.{i}.attn.c_attn.weight": draw(16, 48), f"h.{i}.attn.c_proj.weight": draw(16, 16)}
        model |= {f"h.{i}.mlp.c_fc.weight": draw(16, 64), f"h.{i}.mlp.c_proj.weight": draw(64, 16)}
        model[f"h.{i}.attn.c_attn.bias"] = draw(48)
    return model


def add_prefix(model: llama.Weights, prefix: str) -> llama.Weights:
    """Return a model with a prefix of all names but those of the output layer."""
    return {name if name.startswith("lm_head") else prefix + name: array for name, array in model.items()}


def remove_prefix(model: llama.Weights, prefix: str) -> llama.Weights:
    """Return a model without the prefix of its names."""
    return {name.removeprefix(prefix): array for name, array in model.items()}


def turn(model: llama.Weights, *, kept: tuple[str, ...] = ()) -> llama.Weights:
    """Return a GPT-2 with outputs first, but for the tensors whose names end with one of the given texts."""
    turned = {}
    for name, array in model.items():
        is_layer = ".h." in f".{name}" and array.ndim == 2
        turned[name] = array.T if is_layer and not name.endswith(kept or "/") else array
    return turned


def find(report: syncheck.Report) -> dict[str, set[str]]:
    """Return the names of the tensors of each finding."""
    return {finding.code: set(finding.tensors) for finding in report.groups[-1].findings}


@pytest.mark.parametrize("prefixes", [("", ""), ("transformer.", ""), ("", "transformer."), ("transformer.",) * 2])
def test_gpt2_with_and_without_prefix(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    """The right conversion is in sync, and a square projection that was forgotten is the only finding."""
    model = {**make_gpt2(), "lm_head.weight": draw(20, 16)}
    forgotten = "h.2.attn.c_proj.weight"
    a = llama.write(tmp_path / "a", add_prefix(model, prefixes[0]))
    b = llama.write(tmp_path / "b", add_prefix(turn(model), prefixes[1]))
    c = llama.write(tmp_path / "c", add_prefix(turn(model, kept=(forgotten,)), prefixes[1]))
    named = max(prefixes, key=len) + forgotten
    for first, second, wrong in ((a, b, c), (b, a, None)):
        report = syncheck.diff(first, second, options=GPT2)
        assert (report.exit_code, report.counts.identical) == (0, len(model))
        if wrong is not None:
            assert find(syncheck.diff(first, wrong, options=GPT2)) == {"SYN304": {named}}


def test_an_additional_tensor_keeps_its_name(tmp_path: Path) -> None:
    """Only names that the map or the other model has get the prefix, so nothing is paired by chance."""
    model = make_gpt2()
    a = llama.write(tmp_path / "a", add_prefix(model, "transformer."))
    b = llama.write(tmp_path / "b", {**turn(model), "score.weight": draw(2, 16)})
    assert find(syncheck.diff(a, b, options=GPT2)) == {"SYN101": {"score.weight"}}


def test_the_base_model_of_llama(tmp_path: Path) -> None:
    """A file of the base model equals Megatron's names and files with the prefix, and a swap is found."""
    model = {name: array for name, array in llama.make_model().items() if name != "lm_head.weight"}
    base = llama.write(tmp_path / "base", remove_prefix(model, "model."), llama.CONFIG)
    options = DiffOptions(map="llama")
    full = llama.write(tmp_path / "full", model, llama.CONFIG)
    assert syncheck.diff(base, full, options=options).exit_code == 0
    for swap in (False, True):
        megatron = llama.to_megatron({**model, "lm_head.weight": draw(llama.WORDS, llama.WIDTH)}, swap=swap)
        del megatron["output_layer.weight"]
        other = llama.write(tmp_path / f"megatron{swap}", megatron)
        for report in (syncheck.diff(base, other, options=options), syncheck.diff(other, base)):
            assert report.exit_code == int(swap)
            assert find(report).keys() == ({"SYN305"} if swap else set())


def test_the_base_model_of_resnet(tmp_path: Path) -> None:
    """Names of Hugging Face without `resnet.` are recognized beside those of torchvision."""
    torchvision = {"conv1.weight": draw(8, 3, 3, 3), "bn1.weight": draw(8), "bn1.bias": draw(8)}
    hugging_face = {
        "embedder.embedder.convolution.weight": torchvision["conv1.weight"],
        "embedder.embedder.normalization.weight": torchvision["bn1.weight"],
        "embedder.embedder.normalization.bias": torchvision["bn1.bias"],
    }
    for j in range(2):
        weight = torchvision[f"layer1.{j}.conv1.weight"] = draw(8, 8, 3, 3)
        hugging_face[f"encoder.stages.0.layers.{j}.layer.0.convolution.weight"] = weight
    a, b = llama.write(tmp_path / "a", torchvision), llama.write(tmp_path / "b", hugging_face)
    report = syncheck.diff(a, b)
    assert (report.exit_code, report.counts.identical) == (0, 5)
    c = llama.write(tmp_path / "c", add_prefix(hugging_face, "resnet."))
    assert syncheck.diff(b, c, options=DiffOptions(map="resnet")).exit_code == 0
    # Without the option, another prefix is a proposal.
    assert syncheck.diff(b, c).exit_code == 2


def test_the_prefix_of_a_map_file(tmp_path: Path) -> None:
    """A file states a prefix, it is written with the map, and a prefix is no template."""
    path = tmp_path / "map.toml"
    rule = "[[rule]]\nname = 'net.fc.{i}.w'\nparts = ['net.fc.{i}.w']\ntranspose = true\n"
    path.write_text(f"prefix = 'net.'\n{rule}")
    model = {"fc.0.w": draw(4, 6), "fc.1.w": draw(6, 6), "norm.w": draw(6)}
    turned = {name: array.T if array.ndim == 2 else array for name, array in model.items()}
    a, b = llama.write(tmp_path / "a", model), llama.write(tmp_path / "b", add_prefix(turned, "net."))
    copy = tmp_path / "copy.toml"
    write_map(str(copy), read_map(str(path)))
    for file in (path, copy):
        assert syncheck.diff(a, b, options=DiffOptions(map=str(file))).exit_code == 0
    path.write_text(f"prefix = '{{i}}.'\n{rule}")
    with pytest.raises(UsageError, match=r"map\.toml: prefix"):
        read_map(str(path))
