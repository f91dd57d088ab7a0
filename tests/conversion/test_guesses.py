"""Tensors with equal data: a copy that one model lacks is missing, and initial values have one rule for all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support import llama
from support.states import add_prefix

import syncheck
from syncheck.diagnose import baseline
from syncheck.options import DiffOptions

if TYPE_CHECKING:
    from pathlib import Path

    from support.llama import Weights

RNG = np.random.default_rng(0)
FIRST, SECOND, THIRD = (RNG.standard_normal((8, 8)).astype("f4") for _ in range(3))
ACCEPT = DiffOptions(accept_inferred=True)


def diff_both(tmp_path: Path, a: Weights, b: Weights) -> set[int]:
    """Return the exit codes with an accepted map, with either model as A."""
    first_path, second_path = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    return {
        syncheck.diff(first_path, second_path, options=ACCEPT).exit_code,
        syncheck.diff(second_path, first_path, options=ACCEPT).exit_code,
    }


def number(template: str, *weights: Any) -> Weights:
    """Return weights under the names of a template."""
    return {template.format(i): weight for i, weight in enumerate(weights)}


COPIES: list[tuple[Weights, Weights]] = [
    ({"q": FIRST, "k": FIRST, "v": SECOND}, {"n.q": FIRST, "n.v": SECOND}),
    # The last layer is a copy of the one before.
    (number("h.{}.w", FIRST, SECOND, SECOND), number("n.{}.w", FIRST, SECOND)),
    (number("h.{}.w", FIRST, SECOND, THIRD, THIRD), {"n.0.w": FIRST, "n.1.w": SECOND, "n.3.w": THIRD}),
    # Upcycled experts.
    ({"r.w": SECOND, **number("l.experts.{}.w", FIRST, FIRST, FIRST, FIRST)}, {"x.w": SECOND, "m.experts.0.w": FIRST}),
    (number("e.{}.w", FIRST, FIRST, FIRST, FIRST), number("x.{}.w", FIRST, FIRST)),
    # Teacher and student.
    ({"student.w": FIRST, "teacher.w": FIRST, "h": SECOND}, {"s.w": FIRST, "x": SECOND}),
    ({"s.embed.weight": FIRST, "t.embed.weight": FIRST, "h": SECOND}, {"embed.weight": FIRST, "x": SECOND}),
    # Neither positions nor a second output layer use an embedding.
    ({"embed.weight": FIRST, "embed_positions.weight": FIRST, "h": SECOND}, {"tok.w": FIRST, "x": SECOND}),
    ({"head.weight": FIRST, "score.weight": FIRST, "h": SECOND}, {"head.w": FIRST, "x": SECOND}),
]


@pytest.mark.parametrize(("more", "fewer"), COPIES)
def test_a_copy_that_one_model_lacks_is_missing(tmp_path: Path, more: Weights, fewer: Weights) -> None:
    """Another tensor with its data does not replace it."""
    assert diff_both(tmp_path, more, fewer) == {1}
    # All copies in both models.
    assert diff_both(tmp_path / "all", more, add_prefix(more, "n.")) == {0}


TIED = [
    ("transformer.wte.weight", "lm_head.weight"),
    ("gpt_neox.embed_in.weight", "embed_out.weight"),
    ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ("cls.predictions.bias", "cls.predictions.decoder.bias"),
]


@pytest.mark.parametrize("names", TIED)
def test_weights_that_models_tie(tmp_path: Path, names: tuple[str, ...]) -> None:
    """An embedding and its output layer may be one tensor, but not if there is a third tensor with this data."""
    a: Weights = dict.fromkeys(names, FIRST) | {"h.0.w": SECOND}
    b: Weights = {"tok.w": FIRST, "x.0.w": SECOND}
    assert diff_both(tmp_path, a, b) == {0}
    assert diff_both(tmp_path / "third", a | {"extra.weight": FIRST}, b) == {1}


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_that_share_their_memory(tmp_path: Path, layers: int) -> None:
    """torch.save keeps shared memory, as of ALBERT's layers; copies of a layer are other tensors."""
    torch = pytest.importorskip("torch")
    shared, remainder = torch.randn(4, 4), torch.randn(4, 4)
    models = {
        "shared": {f"layers.{i}.w": shared for i in range(4)} | {"v": remainder},
        "copies": {f"layers.{i}.w": shared.clone() for i in range(4)} | {"v": remainder},
        "group": {f"group.{i}.w": shared.clone() for i in range(layers)} | {"x": remainder},
    }
    paths = {}
    for name, model in models.items():
        paths[name] = str(tmp_path / f"{name}.pth")
        torch.save(model, paths[name])
    for name, code in (("shared", 0), ("copies", 1)):
        assert syncheck.diff(paths[name], paths["group"], options=ACCEPT).exit_code == code
        assert syncheck.diff(paths["group"], paths[name], options=ACCEPT).exit_code == code


def make_norms(layers: int, first: str = "weight", second: str = "bias", start: int = 0) -> tuple[Weights, Weights]:
    """Return a model with norms of 1 and 0, and the same model with these names of their weight and bias."""
    a: Weights = {}
    b: Weights = {}
    for i in range(layers):
        weight = RNG.standard_normal((8, 8)).astype("f4")
        a |= {f"blocks.{i}.fc.weight": weight, f"blocks.{i}.ln.weight": np.ones(8, "f4")}
        a[f"blocks.{i}.ln.bias"] = np.zeros(8, "f4")
        b |= {f"h.{i + start}.fc.weight": weight, f"h.{i + start}.norm.{first}": np.ones(8, "f4")}
        b[f"h.{i + start}.norm.{second}"] = np.zeros(8, "f4")
    return a, b


NORMS = [("weight", "bias"), ("gamma", "beta"), ("g", "h")]


@pytest.mark.parametrize(("first", "second"), NORMS)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 3])
def test_initial_values_have_one_rule(tmp_path: Path, first: str, second: str, layers: int, start: int) -> None:
    """A layer whose weight and bias are exchanged is a finding: the other layers show it, or their names."""
    a, b = make_norms(layers, first, second, start)
    single, altered = f"h.{start + layers // 2}.norm.{first}", f"h.{start + layers // 2}.norm.{second}"
    exchanged = b | {single: b[altered], altered: b[single]}
    assert diff_both(tmp_path, a, b) == {0}
    # Nothing shows which name of a single norm is its weight.
    code = 0 if layers == 1 and first == "g" else 1
    assert diff_both(tmp_path / "exchanged", a, exchanged) == {code}
    if layers > 2:
        assert diff_both(tmp_path / "zeroed", a, b | {single: b[altered]}) == {1}


def test_one_norm_outside_of_all_layers(tmp_path: Path) -> None:
    """The weight of a norm is not the bias of another, with initial values and with trained ones."""
    for i, (weight, bias) in enumerate([(np.ones(8, "f4"), np.zeros(8, "f4")), (FIRST[0], SECOND[0])]):
        a: Weights = {"w": THIRD, "ln_f.weight": weight, "ln_f.bias": bias}
        b: Weights = {"x": THIRD, "norm.weight": weight, "norm.bias": bias}
        assert diff_both(tmp_path / f"{i}", a, b) == {0}
        assert diff_both(tmp_path / f"{i}x", a, b | {"norm.weight": bias, "norm.bias": weight}) == {1}


def test_layers_of_two_kinds_with_norms(tmp_path: Path) -> None:
    """Norms of 1 under two names in the other model."""
    a: Weights = {}
    b: Weights = {}
    for i in range(6):
        kind = "attn" if i % 2 else "mamba"
        weight = RNG.standard_normal((8, 8)).astype("f4")
        a |= {f"l.{i}.mix.weight": weight, f"l.{i}.norm.weight": np.ones(8, "f4")}
        b |= {f"h.{i}.{kind}.weight": weight, f"h.{i}.{kind}_norm.weight": np.ones(8, "f4")}
    assert diff_both(tmp_path, a, b) == {0}


def test_a_baseline_accepts_no_guess(tmp_path: Path) -> None:
    """Findings of a baseline are accepted, and an inferred map is not: the verdict stays undecided."""
    a = number("h.{}.w", FIRST, SECOND, THIRD)
    b = number("n.{}.w", FIRST, SECOND, THIRD.T.copy())
    paths = llama.write(tmp_path / "a", a), llama.write(tmp_path / "b", b)
    for options, exit_code in ((DiffOptions(), 2), (ACCEPT, 0)):
        report = syncheck.diff(*paths, options=options)
        assert report.exit_code == 1
        known = baseline.update_baseline(report, frozenset())
        assert baseline.apply_baseline(report, known).exit_code == exit_code
