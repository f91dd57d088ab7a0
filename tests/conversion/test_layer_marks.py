"""A number is a layer's wherever it stands in a name, and the numbers of words and of modules in a layer are text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import llama
from support.listings import list_codes

import syncheck
from syncheck.conversion.layer_marks import mark_names
from syncheck.conversion.numbering import MARK
from syncheck.options import DiffOptions
from syncheck.snapshots import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.llama import Weights

LAYERS, SIZE = 4, 8
# Names of the tensor `part` of layer `i`, and whether the written map has one rule for all layers.
SCHEMES: dict[str, tuple[Callable[[int, str], str], bool]] = {
    "blk2/wo": (lambda i, part: f"blk{i}/{part}", True),
    "blk/2/wo": (lambda i, part: f"blk/{i}/{part}", True),
    "layer_2.wo": (lambda i, part: f"layer_{i}.{part}", True),
    "net_2_wo": (lambda i, part: f"net_{i}_{part}", True),
    "wo_2": (lambda i, part: f"{part}_{i}", True),
    "net[2]:wo": (lambda i, part: f"net[{i}]:{part}", True),
    "Layer2wo": (lambda i, part: f"Layer{i}{part.title()}", True),
    "blk3/wo": (lambda i, part: f"blk{i + 1}/{part}", False),
    "h02.wo": (lambda i, part: f"h{i:02}.{part}", False),
    "blk.02.wo": (lambda i, part: f"blk.{i:02}.{part}", False),
    "s1b0-wo": (lambda i, part: f"s{i // 2}b{i % 2}-{part}", False),
}
PARTS = ("wo", "attn_wo", "n1")


def make_models() -> tuple[Weights, list[Weights]]:
    """Return a model, and the tensors of its layers by part; one matrix of each layer is transposed."""
    rng = np.random.default_rng(0)
    a: Weights = {}
    layers: list[Weights] = []
    for i in range(LAYERS):
        out, down = rng.standard_normal((2, SIZE, SIZE), np.float32)
        norm = rng.standard_normal(SIZE, np.float32)
        a |= {f"layers.{i}.o.weight": out, f"layers.{i}.down.weight": down, f"layers.{i}.norm.weight": norm}
        layers.append(dict(zip(PARTS, (out.T, down, norm), strict=True)))
    return a, layers


def name_all(layers: list[Weights], scheme: str) -> Weights:
    """Return the tensors of all layers by their names in a scheme."""
    name, _ = SCHEMES[scheme]
    return {name(i, part): weight for i, layer in enumerate(layers) for part, weight in layer.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_rule_for_all_layers(tmp_path: Path, scheme: str) -> None:
    """Equal models are equal under a map that can be written and used."""
    first, layers = make_models()
    a, b = llama.write(tmp_path / "a", first), llama.write(tmp_path / "b", name_all(layers, scheme))
    written = tmp_path / "map.toml"
    assert syncheck.diff(a, b, options=DiffOptions(write_map=str(written))).exit_code == 2
    assert syncheck.diff(a, b, options=DiffOptions(map=str(written))).exit_code == 0
    _, is_one_rule = SCHEMES[scheme]
    rules = len(PARTS) if is_one_rule else len(PARTS) * LAYERS
    assert written.read_text().count("\nname = ") == rules


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fault", ["transposed", "exchanged"])
def test_a_fault_in_one_layer(tmp_path: Path, scheme: str, fault: str) -> None:
    """A layer in the other orientation, and two layers with each other's data, are findings."""
    first, layers = make_models()
    if fault == "transposed":
        layers[2]["wo"] = layers[2]["wo"].T
    else:
        layers[1], layers[2] = layers[2], layers[1]
    a, b = llama.write(tmp_path / "a", first), llama.write(tmp_path / "b", name_all(layers, scheme))
    report = syncheck.diff(a, b, options=DiffOptions(accept_inferred=True))
    assert report.exit_code == 1
    code = "SYN304" if fault == "transposed" else "SYN313"
    assert code in list_codes(report.findings)


def test_modules_of_a_layer_in_another_order(tmp_path: Path) -> None:
    """The numbers of modules that people count from 1 show no order: w1, w3 and w2 may be fc1, fc2 and fc3."""
    rng = np.random.default_rng(0)
    first: Weights = {}
    second: Weights = {}
    for i in range(LAYERS):
        for old, new in ((1, 1), (3, 2), (2, 3)):
            weight = rng.standard_normal((SIZE, SIZE), np.float32)
            first[f"layers.{i}.w{old}.weight"] = second[f"blk{i}/fc{new}"] = weight
    a, b = llama.write(tmp_path / "a", first), llama.write(tmp_path / "b", second)
    assert syncheck.diff(a, b, options=DiffOptions(accept_inferred=True)).exit_code == 0


@pytest.mark.parametrize("prefix", ["", "block.", "layers.0."])
@pytest.mark.parametrize(
    ("order", "code"),
    [
        ((1, 3, 2), 2),
        ((2, 1), 2),
        ((3, 2, 1), 2),
        # Most modules show that equal numbers belong together, so two exchanged modules are a fault.
        ((1, 2, 3, 5, 4), 1),
    ],
)
def test_modules_of_a_single_block_in_another_order(
    tmp_path: Path, prefix: str, order: tuple[int, ...], code: int
) -> None:
    """Without a second layer, nothing shows that w2 should be fc2, so the verdict is undecided."""
    rng = np.random.default_rng(0)
    first: Weights = {"embed": rng.standard_normal((SIZE, SIZE), np.float32)}
    second: Weights = dict(first)
    for old, new in enumerate(order, 1):
        weight = rng.standard_normal((2 * SIZE, SIZE), np.float32)
        bias = rng.standard_normal(2 * SIZE, np.float32)
        first |= {f"{prefix}w{old}.weight": weight, f"{prefix}w{old}.bias": bias}
        second |= {f"{prefix}fc{new}.weight": weight, f"{prefix}fc{new}.bias": bias}
    a, b = llama.write(tmp_path / "a", first), llama.write(tmp_path / "b", second)
    # Inside of a numbered layer, the numbers of modules are text.
    expected = 2 if prefix == "layers.0." else code
    for pair in ((a, b), (b, a)):
        report = syncheck.diff(*pair)
        assert report.exit_code == expected
        assert list_codes(report.findings) == (["SYN313"] if expected == 1 else [])


@pytest.mark.parametrize(
    "names",
    [
        ["h.0.w1", "h.0.w2", "h.1.w1", "h.1.w2"],
        ["h.0.k_proj_8bit", "h.0.k_proj_4bit"],
        ["conv2d.w", "conv1d.w", "conv3x3.w", "conv1x1.w"],
        ["h1.w", "h01.w"],
        ["gpt2.w"],
    ],
)
def test_numbers_that_are_text(names: list[str]) -> None:
    """Numbers of modules in a layer and of words, and different texts of one number, get no marks."""
    assert list(mark_names({name: make_tensor(name, 4, 4) for name in names})) == names


def test_stages_of_other_shapes_are_text() -> None:
    """The stages of a ResNet have other shapes, so their numbers get no marks."""
    tensors = {f"layer{i}.0.bn1.weight": make_tensor("bn", 2**i) for i in (1, 2, 3, 4)}
    assert list(mark_names(tensors)) == list(tensors)


def test_experts_in_a_layer() -> None:
    """Numbers from 0 count inside of a layer, too."""
    names = [f"blk{i}/expert{j}/w{k}" for i in (1, 2) for j in (0, 1, 2) for k in (1, 2)]
    names += ["blk1/norm", "blk2/norm"]
    marked = list(mark_names({name: make_tensor(name, 4, 4) for name in names}))
    m = MARK
    assert marked[0] == f"blk{m}1{m}/expert{m}0{m}/w1"
    assert marked[-1] == f"blk{m}2{m}/norm"


def make_tensor(name: str, *shape: int) -> Tensor:
    """Return a tensor without data."""
    return Tensor(name, "float32", shape, strides=(1,) * len(shape), path="", offset=0)
