"""Inferred maps that names refute: no option accepts them, and a map of the user does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from support import llama
from support.listings import list_codes
from support.states import add_prefix

import syncheck
from syncheck.messages import Note, Undecided
from syncheck.options import DiffOptions
from syncheck.report.undecided import undecided_reason

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.llama import Weights

ACCEPT = DiffOptions(accept_inferred=True)
RNG = np.random.default_rng(0)
LAYERS = 3
# A text that no name has, for the exchange of two texts.
SWAP = "\0"


def replace_all(model: Weights, *pairs: tuple[str, str]) -> Weights:
    """Return a model with other text in its names, one pair after the other."""
    replaced = {}
    for name, weight in model.items():
        for old, new in pairs:
            name = name.replace(old, new)
        replaced[name] = weight
    return replaced


def exchange(model: Weights, first: str, second: str) -> Weights:
    """Return a model with two texts exchanged in all names."""
    return replace_all(model, (first, SWAP), (second, first), (SWAP, second))


def rename(model: Weights) -> Weights:
    """Return a model with other names for its modules, and with the same words for its matrices."""
    return replace_all(model, ("model.layers.", "x.blocks."), ("self_attn.", "attention."), ("model.", "x.net."))


def make_linear_layers(names: str, *, own: tuple[str, str] = ("weight", "bias")) -> Weights:
    """Return layers of linear modules with a weight and a bias."""
    model = {"embed.w": RNG.standard_normal((20, 8)).astype("f4")}
    for i in range(LAYERS):
        for name in names:
            model[f"h.{i}.{name}.{own[0]}"] = RNG.standard_normal((8, 8)).astype("f4")
            model[f"h.{i}.{name}.{own[1]}"] = RNG.standard_normal(8).astype("f4")
    return model


def exchange_weights_only(model: Weights) -> Weights:
    """Return a model under other names, with the weights of q and o exchanged, and not their biases."""
    weights = {name: weight for name, weight in model.items() if weight.ndim == 2}
    biases = {name: bias for name, bias in model.items() if bias.ndim < 2}
    pairs = (("h.", "layer."), (".q.", ".query."), (".o.", ".dense."))
    return replace_all(exchange(weights, ".q.", ".o.") | biases, *pairs, ("embed", "wte"))


def fuse(model: Weights, orders: tuple[str, str]) -> Weights:
    """Return a model with q, k and v in one module. orders: of the weights and of the biases."""
    fused = {"tok.w": model["embed.w"]}
    for i in range(LAYERS):
        for kind, order in zip(("weight", "bias"), orders, strict=True):
            fused[f"b.{i}.att.joined.{kind}"] = np.concatenate([model[f"h.{i}.{part}.{kind}"] for part in order])
    return fused


def diff_both(folder: Path, a: Weights, b: Weights, options: DiffOptions = ACCEPT) -> list[syncheck.Report]:
    """Return the comparison of two models, and the comparison with the other model as A."""
    first, second = llama.write(folder / "a", a), llama.write(folder / "b", b)
    return [syncheck.diff(first, second, options=options), syncheck.diff(second, first, options=options)]


def spell(model: Weights, *words: str) -> Weights:
    """Return a model of q, k, v and o with other words for the first of them, and other names around them."""
    pairs = [(f".{letter}.", f".{word}.") for letter, word in zip("qkvo", words, strict=False)]
    return replace_all(model, *pairs, ("h.", "layer."), ("embed", "wte"))


MODEL = llama.make_model()
LINEAR, LINEAR_PARTS = make_linear_layers("qkvo"), make_linear_layers("qkv")
ZERO_BIASES = LINEAR | {name: bias * 0 for name, bias in LINEAR.items() if bias.ndim < 2}
REFUTED: dict[str, Callable[[], tuple[Weights, Weights]]] = {
    "prefix": lambda: (MODEL, add_prefix(exchange(MODEL, "q_proj", "o_proj"), "policy.")),
    "renamed modules": lambda: (MODEL, rename(exchange(MODEL, "gate_proj", "up_proj"))),
    "names of another kind": lambda: (
        MODEL,
        replace_all(rename(exchange(MODEL, "q_proj", "o_proj")), (".weight", "_w"), ("_proj", "")),
    ),
    "norms": lambda: (MODEL, rename(exchange(MODEL, "input_", "post_attention_"))),
    "three names": lambda: (LINEAR, replace_all(exchange(exchange(LINEAR, ".q", ".k"), ".k", ".o"), ("h.", "b.x."))),
    "weights without biases": lambda: (LINEAR, exchange_weights_only(LINEAR)),
    "other names of weight and bias": lambda: (
        LINEAR,
        replace_all(exchange_weights_only(LINEAR), (".weight", ".kernel"), (".bias", ".offset")),
    ),
    "fused weights": lambda: (LINEAR_PARTS, fuse(LINEAR_PARTS, ("kqv", "qkv"))),
    "fused biases": lambda: (LINEAR_PARTS, fuse(LINEAR_PARTS, ("qkv", "vkq"))),
    "other spellings": lambda: (LINEAR, spell(exchange(LINEAR, ".q.", ".k."), "attention.self.query", "key")),
    "other spellings of the output": lambda: (LINEAR, spell(exchange(LINEAR, ".v.", ".o."), "wq", "wk", "wv", "wo")),
    "spellings of numbered modules": lambda: (
        LINEAR,
        spell(exchange(LINEAR, ".q.", ".o."), "to_q", "to_k", "to_v", "to_out.0"),
    ),
    "spellings in one word": lambda: (
        MODEL,
        replace_all(
            exchange(MODEL, "gate_proj", "up_proj"),
            ("model.layers.", "blk."),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ),
    ),
    "stated order": lambda: (LINEAR_PARTS, replace_all(fuse(LINEAR_PARTS, ("kqv", "kqv")), ("joined", "wqkv"))),
}


@pytest.mark.parametrize("case", REFUTED)
def test_a_map_that_names_refute_is_never_accepted(tmp_path: Path, case: str) -> None:
    """The verdict is undecided with --accept-inferred too, and the map passes after a review."""
    a, b = REFUTED[case]()
    marks = {Note.REFUTED_RULE, Note.DIVIDED_RULE, Note.CONTRADICTING_RULE}
    for report in (*diff_both(tmp_path, a, b), *diff_both(tmp_path, a, b, DiffOptions())):
        assert (report.verdict, undecided_reason(report).code) == ("undecided", Undecided.CONTRADICTED_MAP)
        codes = list_codes(report.groups[-1].notes)
        assert marks & set(codes)
        assert Note.ACCEPTED_MAP not in codes
    written = tmp_path / "map.toml"
    diff_both(tmp_path, a, b, DiffOptions(write_map=str(written)))
    assert "B may be wrong." in written.read_text()
    assert {report.exit_code for report in diff_both(tmp_path, a, b, DiffOptions(map=str(written)))} == {0}


def test_names_in_no_order_with_a_prefix(tmp_path: Path) -> None:
    """If all names have one prefix, constants of one shape are not exchanged either, but equal data proves nothing."""
    ones, twos = np.ones(8, "f4"), np.full(8, 2, "f4")
    a = {"a.weight": ones, "b.weight": ones, "c.weight": twos}
    exchanged = {"na.weight": twos, "nb.weight": ones, "nc.weight": ones}
    assert [report.exit_code for report in diff_both(tmp_path, a, exchanged)] == [2, 2]
    assert [report.exit_code for report in diff_both(tmp_path / "right", a, add_prefix(a, "n"))] == [0, 0]


def split_joined(model: Weights) -> tuple[Weights, Weights]:
    """Return a model, and the model with norms inside of the linear modules, as TransformerEngine names them."""
    joined = {}
    for name, weight in model.items():
        # h.0.q.weight becomes h.0.joined.q_weight.
        outer, module, last = name.rsplit(".", 2) if name.startswith("h.") else ("", "tok", name)
        joined[f"{outer}.joined.{module}_{last}" if outer else module] = weight
    return model, joined


ACCEPTED: dict[str, Callable[[], tuple[Weights, Weights]]] = {
    "renamed": lambda: (MODEL, rename(MODEL)),
    "a module that joins modules": lambda: split_joined(make_linear_layers("qk")),
    "numbers in words": lambda: (
        replace_all(LINEAR, (".q.", ".w1."), (".k.", ".w2."), (".v.", ".w3.")),
        replace_all(LINEAR, ("h.", "b."), (".q.", ".w1."), (".k.", ".w3."), (".v.", ".w2."), ("embed", "wte")),
    ),
    "spellings": lambda: (LINEAR, spell(LINEAR, "attention.self.query", "linear_k", "to_v", "to_out.0")),
    "words of other layers": lambda: (
        replace_all(LINEAR, (".q.", ".mlp.key."), (".k.", ".mlp.value."), (".v.", ".query_norm."), (".o.", ".gate.")),
        replace_all(LINEAR, ("h.", "b."), (".q.", ".up."), (".k.", ".down."), (".v.", ".q_ln."), (".o.", ".router.")),
    ),
    "a norm at another place": lambda: (
        replace_all(LINEAR, (".q.", ".pre_norm."), (".k.", ".post_norm.")),
        replace_all(LINEAR, ("h.", "b."), (".q.", ".norm."), (".k.", ".pre_mlp_norm."), ("embed", "wte")),
    ),
    "biases of zero": lambda: (
        ZERO_BIASES,
        replace_all(ZERO_BIASES, ("h.", "b."), (".q.", ".z."), ("embed", "wte")),
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_other_names_are_no_contradiction(tmp_path: Path, case: str) -> None:
    """A right conversion is accepted: other words, numbers in words, joined modules and equal data refute nothing."""
    a, b = ACCEPTED[case]()
    assert [report.exit_code for report in diff_both(tmp_path, a, b)] == [0, 0]
