"""Inferred rules whose parts are in another order than the name of the fused tensor states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare
from support.listings import list_fields

import syncheck
from syncheck.conversion.name_maps import Rule
from syncheck.conversion.part_names import find_stated_order
from syncheck.diagnose.model_layouts import FusedOrder
from syncheck.messages import Note

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("fused", "parts", "stated"),
    [
        ("a.{i}.gate_up.weight", ("m.up_proj.weight", "m.gate_proj.weight"), ("gate", "up")),
        ("a.{i}.gate_up_proj", ("m.gate_proj", "m.up_proj"), ()),
        ("a.wqkv.weight", ("m.q_proj.weight", "m.v_proj.weight", "m.k_proj.weight"), ("q", "k", "v")),
        ("a.query_key_value.bias", ("m.to_k.bias", "m.to_q.bias", "m.to_v.bias"), ("q", "k", "v")),
        ("a.qkv.weight", ("m.query.weight", "m.key.weight", "m.value.weight"), ()),
        ("a.w13", ("m.w3", "m.w1"), ("1", "3")),
        # The name states no order.
        ("a.c_attn.weight", ("m.v.weight", "m.q.weight"), ()),
        ("a.regulator.weight", ("m.up.weight", "m.gate.weight"), ()),
        ("a.in_proj_weight", ("m.k.weight", "m.q.weight"), ()),
        ("a.stack", ("m.{e}.weight",), ()),
        ("a.ignored", (), ()),
    ],
)
def test_order_that_a_fused_name_states(fused: str, parts: tuple[str, ...], stated: tuple[str, ...]) -> None:
    """An inferred rule whose parts are in another order than the fused name is marked."""
    assert find_stated_order(Rule(fused, parts)) == stated


def test_swapped_parts_in_all_layers_are_marked(tmp_path: Path) -> None:
    """An exchange in all layers gives a consistent inferred map, so its rule has a mark; the right order has none."""
    marks = []
    for order in (("gate", "up"), ("up", "gate")):
        fused, divided = {}, {}
        for i in range(3):
            fused[f"blocks.{i}.gate_up.weight"] = weight = torch.randn(8, 4)
            for name, half in zip(order, weight.chunk(2), strict=True):
                divided[f"layers.{i}.{name}_proj.weight"] = half.clone()
        torch.save(fused, tmp_path / "a.pt")
        torch.save(divided, tmp_path / "b.pt")
        report = syncheck.diff(tmp_path / "a.pt", tmp_path / "b.pt")
        assert report.exit_code == 2
        marks.append(Note.CONTRADICTING_RULE in list_fields(report.groups[0].notes, "code"))
    assert marks == [False, True]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_wrong_order_of_the_copy_names_the_parts_of_the_copy(tmp_path: Path, groups: int) -> None:
    """If A is fused, the finding names the parts of B that hold other rows, not an order of A."""
    weight = torch.randn(16, 4)
    rows = weight.view(groups, 2, 8 // groups, 4).transpose(0, 1).reshape(2, 8, 4)
    names = ("b.q_proj.weight", "b.k_proj.weight")
    wrong_order = names if groups > 1 else names[::-1]
    path = tmp_path / "map.toml"
    path.write_text(f'kv_heads = {groups}\n[[rule]]\nname = "a.qk.weight"\nparts = {list(names)}\n')
    copy = {"n.weight": torch.ones(4), **dict(zip(wrong_order, rows, strict=True))}
    source = {"n.weight": torch.ones(4), "a.qk.weight": weight}
    findings, _ = compare(tmp_path, source, copy, map=str(path))
    fact = findings["SYN305"].facts[0]
    assert fact.code is (FusedOrder.EXCHANGED if groups == 1 else FusedOrder.DIVIDED)
    if groups == 1:
        assert (fact.parameters["parts"], fact.parameters["expected"]) == ("k_proj, q_proj", "q_proj, k_proj")
    findings, _ = compare(tmp_path, copy, source, map=str(path))
    assert findings["SYN305"].facts[0].parameters["side"] == "B"
