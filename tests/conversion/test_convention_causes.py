"""Tensors in the layout of A are the fault if the other layers show that B needs another layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare, draw, find

from syncheck.diagnose.conventions import Conventions

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from support.found_causes import State

    from syncheck.records import Finding

WIDTH, HEAD = 32, 4


def make_gpt2(layers: int) -> State:
    """Return GPT-2's linear layers: a square one, and one that is not square."""
    state: State = {"wte.weight": draw(20, 16)}
    for layer in range(layers):
        state[f"h.{layer}.attn.c_proj.weight"] = draw(16, 16, seed=layer + 1)
        state[f"h.{layer}.mlp.c_fc.weight"] = draw(16, 64, seed=layer + 100)
    return state


def transpose(state: State, kept: Collection[str]) -> State:
    """Return the state with transposed linear layers, except for these names."""
    return {name: w if name in kept or "wte" in name else w.T.contiguous() for name, w in state.items()}


def list_exceptions(finding: Finding, statement: object) -> tuple[str, ...]:
    """Return the names of a statement; empty without the statement."""
    for message in finding.facts:
        if message.code is statement:
            return tuple(message.parameters["names"])
    return ()


@pytest.mark.parametrize("kept_layers", [[2], [0, 1, 2, 3, 4, 5, 6], []])
def test_square_matrices_without_transposition(tmp_path: Path, kept_layers: list[int]) -> None:
    """Layers that are not square show the orientation, also if most square layers were left out."""
    state = make_gpt2(9)
    kept = [f"h.{layer}.attn.c_proj.weight" for layer in kept_layers]
    findings, _ = compare(tmp_path, state, transpose(state, kept))
    (finding,) = findings.values()
    assert finding.code == "SYN304"
    assert list_exceptions(finding, Conventions.EXCEPTIONS) == tuple(kept)
    assert finding.certainty == ("likely" if kept else "proved")


def test_a_single_transposed_matrix_is_the_fault(tmp_path: Path) -> None:
    """One of several layers is transposed, square or not: the layers that agree are right."""
    for number, name in enumerate(("h.1.attn.c_proj.weight", "h.1.mlp.c_fc.weight")):
        state = make_gpt2(4)
        folder = tmp_path / str(number)
        folder.mkdir()
        findings, _ = compare(folder, state, {**state, name: state[name].T.contiguous()})
        (finding,) = findings.values()
        assert (finding.certainty, finding.tensors) == ("proved", (name,))
        assert not list_exceptions(finding, Conventions.EXCEPTIONS)


def test_symmetric_matrices_are_no_exceptions(tmp_path: Path) -> None:
    """A projection that starts with zeros, or a symmetric one, has no orientation."""
    state = make_gpt2(6)
    state["h.1.attn.c_proj.weight"] = torch.zeros(16, 16)
    state["h.2.attn.c_proj.weight"] += state["h.2.attn.c_proj.weight"].T.clone()
    findings, _ = compare(tmp_path, state, transpose(state, ()))
    assert not list_exceptions(findings["SYN304"], Conventions.EXCEPTIONS)


def test_rows_in_the_order_of_most_layers(tmp_path: Path) -> None:
    """Fused rows of most layers have another order: the layer with the order of A is named."""
    state = {f"layers.{layer}.wqkv.weight": draw(48, 16, seed=layer) for layer in range(4)}
    copy = {name: w.view(3, 4, 4, 16).transpose(0, 1).reshape(48, 16) for name, w in state.items()}
    kept = "layers.3.wqkv.weight"
    findings, _ = compare(tmp_path, state, {**copy, kept: state[kept]})
    assert list_exceptions(findings["SYN305"], Conventions.EXCEPTIONS) == (kept,)


def make_llama(layers: int) -> State:
    """Return query and key, and further names of Llama."""
    state: State = {"model.embed_tokens.weight": draw(20, WIDTH), "model.norm.weight": draw(WIDTH, seed=1)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for number, name in enumerate("qkvo"):
            rows = WIDTH if name in "qo" else 2 * HEAD
            columns = WIDTH
            state[f"{prefix}self_attn.{name}_proj.weight"] = draw(rows, columns, seed=10 * layer + number + 2)
        state[f"{prefix}input_layernorm.weight"] = draw(WIDTH, seed=10 * layer + 7)
    return state


RENAMED = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "input_layernorm": "attention_norm",
}


def convert_to_meta(state: State, sizes: dict[str, int]) -> State:
    """Return the state in Meta's names and order of rows. sizes: wrong sizes of heads of some tensors."""
    converted: State = {}
    for name, weight in state.items():
        if "q_proj" in name or "k_proj" in name:
            size = sizes.get(name, HEAD)
            halves = weight.view(-1, 2, size // 2, WIDTH)
            weight = halves.transpose(1, 2).reshape(-1, WIDTH)
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        converted[name] = weight.clone()
    return converted


def test_a_size_of_heads_that_fits_half_of_the_tensors(tmp_path: Path) -> None:
    """Key was permuted for other heads than query, and nothing states the size: both are named, none is proved."""
    state = make_llama(4)
    keys = [name for name in state if "k_proj" in name]
    queries = [name for name in state if "q_proj" in name]
    findings, _ = compare(tmp_path, state, convert_to_meta(state, dict.fromkeys(keys, 2 * HEAD)))
    finding = findings["SYN306"]
    assert finding.certainty == "consistent"
    named = {*finding.tensors, *list_exceptions(finding, Conventions.FITTED)}
    assert named == {*keys, *queries}


@pytest.mark.parametrize("wrong_layers", [[0, 1], [6, 7], [3]])
def test_the_size_of_heads_of_most_layers(tmp_path: Path, wrong_layers: list[int]) -> None:
    """Some layers were permuted for other heads: the right layers choose the size, wherever the wrong ones are."""
    state = make_llama(8)
    wrong_names = {
        name for name in state for layer in wrong_layers if f".{layer}." in name and ("q_p" in name or "k_p" in name)
    }
    copy = convert_to_meta(state, dict.fromkeys(wrong_names, 2 * HEAD))
    assert find(tmp_path, state, copy) == {"SYN306": wrong_names}
    findings, _ = compare(tmp_path, state, copy)
    assert findings["SYN306"].certainty == "likely"
