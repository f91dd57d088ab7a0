"""Rows, layers and parts at another place or several times: the cause states what was moved, and never guesses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.found_causes import compare, draw, find, get_parameters
from support.listings import find_texts, list_fields
from support.states import pick

from syncheck.diagnose.model_layouts import FusedOrder
from syncheck.diagnose.model_positions import ExpertMisplaced

if TYPE_CHECKING:
    from pathlib import Path

    from support.found_causes import State

BODY = {"fc.weight": draw(16, 16, seed=2)}
KEY = draw(32, 24, seed=3)


def test_exchanged_layers_of_a_sequential_model(tmp_path: Path) -> None:
    """Layers with numbers as names, also below a module, and norms and biases with few elements."""
    for i, names in enumerate((("0", "2"), ("features.0", "features.3"), ("norm1", "norm2"), ("a.q_norm", "a.k_norm"))):
        first, second = (f"{name}.weight" for name in names)
        state = {first: draw(16, 16, seed=i), second: draw(16, 16, seed=i + 50)} | BODY
        (tmp_path / str(i)).mkdir()
        findings = find(tmp_path / str(i), state, {**state, first: state[second], second: state[first]})
        assert findings == {"SYN313": {first, second}}


def test_exchanged_parts_of_a_fused_tensor(tmp_path: Path) -> None:
    """Names of query, key and value, and of gate and up, are parts of one tensor in other libraries."""
    for i, (first, second) in enumerate(
        (("q_proj", "k_proj"), ("wq", "wv"), ("to_k", "to_v"), ("gate_proj", "up_proj"))
    ):
        names = [f"layers.0.block.{name}.weight" for name in (first, second)]
        state = {name: draw(16, 16, seed=n) for n, name in enumerate(names)} | BODY
        (tmp_path / str(i)).mkdir()
        findings = find(tmp_path / str(i), state, {**state, names[0]: state[names[1]], names[1]: state[names[0]]})
        assert findings == {"SYN305": set(names)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", ["running_var", "running_mean", "bias"])
def test_exchanged_vectors_of_a_few_channels(tmp_path: Path, last: str, dtype: torch.dtype) -> None:
    """Eight trained numbers are not equal by chance, in buffers and in parameters; small integers may be."""
    names = [f"{number}.{last}" for number in (1, 3)]
    first, second = (draw(8, seed=seed, scale=0.3).add(1).to(dtype) for seed in (1, 2))
    state = {"w.weight": draw(16, 16), **dict(zip(names, (first, second), strict=True))}
    copy = state | dict(zip(names, (second, first), strict=True))
    assert find(tmp_path, state, copy) == {"SYN313": set(names)}
    integers = {"w.weight": draw(16, 16), "a.sizes": torch.arange(8), "b.sizes": torch.arange(8) % 4}
    exchanged = integers | {"a.sizes": integers["b.sizes"], "b.sizes": integers["a.sizes"]}
    assert find(tmp_path, integers, exchanged) == {"SYN399": {"a.sizes", "b.sizes"}}


def test_a_copied_norm(tmp_path: Path) -> None:
    """A norm of B is another norm of the same layer of A: it is no part of a fused tensor."""
    state = {f"layers.0.norm{i}.weight": draw(32, seed=i) for i in range(3)} | BODY
    copy = {**state, "layers.0.norm1.weight": state["layers.0.norm0.weight"].clone()}
    assert find(tmp_path, state, copy) == {"SYN313": {"layers.0.norm1.weight"}}


def exchange(name: str) -> str:
    """Return a name in the other one of two layers."""
    return name.replace("h.0", "h.x").replace("h.1", "h.0").replace("h.x", "h.1")


def test_exchanged_layers_in_another_orientation(tmp_path: Path) -> None:
    """GPT-2's linear layers, in both orientations, with two layers exchanged."""
    state: State = {"wte.weight": draw(40, 16), "ln_f.weight": draw(16, seed=1)}
    for layer in range(2):
        state |= {f"h.{layer}.mlp.c_fc.weight": draw(16, 64, seed=layer + 2)}
        state |= {f"h.{layer}.attn.c_proj.weight": draw(16, 16, seed=layer + 20)}
    exchanged = {name: state[exchange(name)] for name in state}
    layers = set(find_texts(state, start="h."))
    assert find(tmp_path, state, exchanged) == {"SYN313": layers}
    transposed = {name: tensor.T if name in layers else tensor for name, tensor in exchanged.items()}
    assert find(tmp_path, state, transposed) == {"SYN313": layers}


@pytest.mark.parametrize("flipped", ["conv1.weight", "features.0.weight", "patch_embed.proj.weight"])
def test_channels_of_an_image(tmp_path: Path, flipped: str) -> None:
    """The first convolution reads blue, green, red: the order of its channels, and nothing about fused tensors."""
    kernel = draw(8, 3, 7, 7)
    state, copy = {flipped: kernel} | BODY, {flipped: kernel.flip(1)} | BODY
    findings, _ = compare(tmp_path, state, copy)
    assert findings.keys() == {"SYN305"}
    assert get_parameters(tmp_path, state, copy, flipped)["channels"] == (2, 1, 0)
    fused = {"a.q_proj.weight": KEY, "a.k_proj.weight": KEY * 2} | BODY
    swapped = {"a.q_proj.weight": KEY * 2, "a.k_proj.weight": KEY} | BODY
    parts, _ = compare(tmp_path, fused, swapped)
    assert parts["SYN305"].cause != findings["SYN305"].cause


def interleave(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows with the halves of each head interleaved."""
    return rows.reshape(-1, 2, size // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def separate(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows with the halves of each head one after the other."""
    return rows.reshape(-1, size // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("name", ["layers.0.self_attn.k_proj.weight", "attention.wq.weight", "attn.to_q.weight"])
@pytest.mark.parametrize(("size", "back"), [(48, 0), (24, 0), (12, 24), (48, 16), (6, 48)])
def test_a_wrong_size_of_a_head(tmp_path: Path, name: str, size: int, back: int) -> None:
    """Rows permuted with any size of a head, also back with another one, and the bias with them."""
    rows, bias = draw(48, 20, seed=4), draw(48, seed=5)
    bias_name = name.replace("weight", "bias")
    state: dict[str, Any] = {name: rows, bias_name: bias} | BODY
    copy = dict(state)
    for each in (name, bias_name):
        copy[each] = interleave(state[each], size)
        if back:
            copy[each] = separate(copy[each], back)
    assert find(tmp_path, state, copy) == {"SYN306": {name, bias_name}}
    parameters = get_parameters(tmp_path, state, copy, name)
    assert parameters["head_dim"] == size
    assert parameters.get("back", 0) == back


@pytest.mark.parametrize(
    ("head_dim", "block", "blocks", "code"),
    [
        (None, 16, (0, 2, 1, 3), "SYN305"),
        (None, 32, (0, 4, 1, 5, 2, 6, 3, 7), "SYN305"),
        (None, 8, (0, 2, 1, 3), "SYN306"),
        (8, 8, (0, 2, 1, 3), "SYN305"),
        (8, 16, (0, 2, 1, 3), "SYN305"),
        (64, 16, (0, 2, 1, 3), "SYN306"),
    ],
)
def test_exchanged_heads(tmp_path: Path, head_dim: int | None, block: int, blocks: tuple[int, ...], code: str) -> None:
    """Blocks of whole heads are in another order. Blocks of half a head were permuted with a wrong size of a head."""
    names = [f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    rows = block * len(blocks)
    state: State = {name: draw(rows, 20, seed=len(name) + i) for i, name in enumerate(names)} | BODY
    copy = dict(state)
    for name in names:
        parts = state[name].split(block)
        copy[name] = torch.cat([parts[part] for part in blocks])
    if head_dim is not None:
        (tmp_path / "config.json").write_text(json.dumps({"head_dim": head_dim}))
    findings = find(tmp_path, state, copy)
    # The value of attention has no rotary embedding.
    expected = {"SYN305": {names[2]}}
    expected[code] = expected.get(code, set()) | {*names[:2]}
    assert findings == expected
    if code == "SYN305":
        assert get_parameters(tmp_path, state, copy, names[0])["pattern"] == "blocks"


def test_the_same_order_of_another_tensor(tmp_path: Path) -> None:
    """Interleaved halves of a tensor that is no query or key are rows in another order."""
    state, copy = {"mlp.up_proj.weight": KEY} | BODY, {"mlp.up_proj.weight": interleave(KEY, 32)} | BODY
    findings = find(tmp_path, state, copy)
    assert findings.keys() <= {"SYN305", "SYN306"}


REPEATS: list[tuple[str, Any, dict[str, Any]]] = [
    (
        "heads",
        KEY.reshape(4, 8, 24).repeat_interleave(2, 0).reshape(64, 24),
        {"pattern": "each", "size": 8, "times": 2},
    ),
    ("rows", KEY.repeat_interleave(3, 0), {"pattern": "each", "size": 1, "times": 3}),
    ("whole", KEY.repeat(4, 1), {"pattern": "tile", "size": 32, "times": 4}),
    ("columns", KEY.repeat(1, 2), {"pattern": "tile", "dim": 1, "times": 2}),
    ("first part", KEY[:8].repeat(4, 1), {"pattern": "tile", "size": 8, "times": 4}),
    ("second head", KEY[8:16].repeat(4, 1), {"pattern": "tile", "start": 8, "size": 8}),
    ("some rows", torch.cat([KEY[:20], KEY[:12]]), {"pattern": "other", "missing": 12}),
]


@pytest.mark.parametrize(("copies", "expected"), [row[1:] for row in REPEATS], ids=list_fields(REPEATS, 0))
def test_a_part_is_repeated(tmp_path: Path, copies: torch.Tensor, expected: dict[str, Any]) -> None:
    """Heads, rows, whole tensors and the part of one rank, in B and in A."""
    name = "layers.0.self_attn.k_proj.weight"
    state, copy = {name: KEY} | BODY, {name: copies} | BODY
    findings, _ = compare(tmp_path, state, copy)
    assert findings.keys() == {"SYN317"}
    assert findings["SYN317"].certainty == "proved"
    parameters = get_parameters(tmp_path, state, copy, name)
    assert pick(parameters, expected) == expected
    if copies.shape != KEY.shape:
        assert find(tmp_path, copy, state) == {"SYN317": {name}}


def test_a_vector_is_repeated(tmp_path: Path) -> None:
    """A buffer of each rank, joined as if it were sharded; constant elements show no copies."""
    vector = draw(24, seed=7)
    assert find(tmp_path, {"scale": vector} | BODY, {"scale": vector.repeat(4)} | BODY) == {"SYN317": {"scale"}}
    ones = {"scale": torch.ones(24)} | BODY
    assert find(tmp_path, ones, {"scale": torch.ones(96)} | BODY) == {"SYN318": {"scale"}}


def test_elements_of_a_sparse_tensor_are_no_padding(tmp_path: Path) -> None:
    """A sparse tensor with one more element: its values have another length, and nothing was padded."""
    matrix = torch.zeros(8, 8)
    matrix[range(6), range(6)] = draw(6, seed=8)
    more = matrix.clone()
    more[7, 7] = 1.0
    findings = find(tmp_path, {"w": matrix.to_sparse()} | BODY, {"w": more.to_sparse()} | BODY)
    assert findings.keys() == {"SYN102"}


def test_a_reversed_order(tmp_path: Path) -> None:
    """Rows or columns are in reverse order; exchanged halves are not."""
    rows, columns, halves = "a.fc.weight", "b.fc.weight", "c.fc.weight"
    state = {rows: KEY, columns: KEY * 2, halves: KEY * 3} | BODY
    copy = state | {rows: KEY.flip(0), columns: (KEY * 2).flip(1), halves: (KEY * 3).roll(16, 0)}
    findings, _ = compare(tmp_path, state, copy)
    codes = list_fields(findings["SYN305"].facts, "code")
    assert codes == [FusedOrder.REVERSED, FusedOrder.COLUMNS_REVERSED, FusedOrder.BLOCKS]


@pytest.mark.parametrize("index", [0, 4, 5])
def test_exchanged_halves_of_an_expert(tmp_path: Path, index: int) -> None:
    """The expert of a stack is stated, and the rows within it; rows of several experts are blocks of all rows."""
    name = "model.layers.1.mlp.experts.gate_up_proj"
    state = {name: draw(6, 32, 8, seed=4)} | BODY
    exchanged = state[name].clone()
    exchanged[index] = exchanged[index].roll(16, 0)
    findings, _ = compare(tmp_path, state, {**state, name: exchanged})
    (fact,) = findings["SYN305"].facts
    assert (fact.code, fact.parameters["index"]) == (FusedOrder.BLOCKS_INSIDE, index)
    firsts = [block.parameters["first"] for block in fact.parameters["blocks"]]
    assert firsts == [16, 0]
    mixed = state[name].clone()
    mixed[1, :4], mixed[3, :4] = state[name][3, :4], state[name][1, :4]
    findings, _ = compare(tmp_path, state, {**state, name: mixed})
    assert list_fields(findings["SYN305"].facts, "code") == [FusedOrder.BLOCKS]


@pytest.mark.parametrize("dim", [0, 1])
def test_the_fix_refers_to_stated_orders_only(tmp_path: Path, dim: int) -> None:
    """Blocks of rows and of columns are stated; any other order is not, and the fix does not refer to it."""
    name = "a.fc.weight"
    state = {name: draw(32, 32, seed=5)} | BODY
    blocks = state[name].roll(8, dim)
    findings, _ = compare(tmp_path, state, {**state, name: blocks})
    (fact,) = findings["SYN305"].facts
    assert [block.parameters["first"] for block in fact.parameters["blocks"]] == [24, 0]
    assert findings["SYN305"].fix.code is FusedOrder.FIX_ROWS
    order = torch.randperm(32, generator=torch.Generator().manual_seed(6))
    findings, _ = compare(tmp_path, state, {**state, name: state[name].index_select(dim, order)})
    assert findings["SYN305"].fix.code is FusedOrder.FIX_UNSTATED


def test_separate_parts_are_no_fused_tensor(tmp_path: Path) -> None:
    """Gate and up, which no model stores as one tensor, are exchanged: the cause does not claim a fused tensor."""
    gate, up = "layers.0.mlp.gate_proj.weight", "layers.0.mlp.up_proj.weight"
    state = {gate: draw(16, 8, seed=1), up: draw(16, 8, seed=2)} | BODY
    findings, _ = compare(tmp_path, state, {**state, gate: state[up], up: state[gate]})
    assert findings["SYN305"].cause.code is FusedOrder.CAUSE_SEPARATE


EXPERTS = {f"mlp.experts.{e}.{x}.weight": draw(8, 8, seed=10 * e + i) for e in range(4) for i, x in enumerate("wv")}
MIXTURE = EXPERTS | {"mlp.gate.weight": draw(4, 32, seed=99), "norm.weight": draw(32, seed=98)}


def renumber(order: tuple[int, ...], rows: tuple[int, ...], last: str = "wv") -> dict[str, torch.Tensor]:
    """Return the experts in another order, and the rows of the router. last: the tensors of each expert that move."""
    moved = {}
    for name in EXPERTS:
        start, number, letter, end = name.rsplit(".", 3)
        if letter in last:
            moved[name] = EXPERTS[f"{start}.{order[int(number)]}.{letter}.{end}"]
    return MIXTURE | moved | {"mlp.gate.weight": MIXTURE["mlp.gate.weight"][list(rows)]}


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (1, 2, 3, 0), (3, 2, 1, 0)])
def test_experts_that_were_renumbered_with_their_router(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Equal orders of experts and rows of the router are one finding, which calls no expert misplaced."""
    findings, _ = compare(tmp_path, MIXTURE, renumber(order, order))
    assert list(findings) == ["SYN310"]
    assert findings["SYN310"].facts[0].code is ExpertMisplaced.ROUTERS
    assert findings["SYN310"].cause.code is ExpertMisplaced.CAUSE_RENUMBERED
    assert "mlp.gate.weight" in findings["SYN310"].tensors


@pytest.mark.parametrize(
    ("order", "rows", "last"),
    [
        ((1, 0, 2, 3), (0, 1, 3, 2), "wv"),
        # The inverse order.
        ((1, 2, 3, 0), (3, 0, 1, 2), "wv"),
        ((1, 0, 2, 3), (1, 0, 2, 3), "w"),
        ((1, 0, 2, 3), (0, 1, 2, 3), "wv"),
    ],
)
def test_experts_in_another_order_than_their_router(
    tmp_path: Path, order: tuple[int, ...], rows: tuple[int, ...], last: str
) -> None:
    """Experts that do not follow the rows of the router, or only in part, are at the wrong place."""
    findings, _ = compare(tmp_path, MIXTURE, renumber(order, rows, last))
    assert findings["SYN310"].cause.code is ExpertMisplaced.CAUSE
    assert ("SYN305" in findings) == (rows != (0, 1, 2, 3))
