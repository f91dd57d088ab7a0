"""Experts in one stack against separate experts, in models whose other names agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.listings import list_fields
from support.llama import LAYERS, make_model, write

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from syncheck.records import Report

    Weights = dict[str, Any]

EXPERTS = 3
KINDS = ("gate", "up", "down")


def name_experts(layer: int, kind: str) -> list[str]:
    """Return the names of the matrices of one kind in a layer."""
    return [f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight" for expert in range(EXPERTS)]


def make_separate() -> Weights:
    """Return a model with separate experts, under names that no map of syncheck has."""
    weights = make_model(experts=EXPERTS)
    return {name.replace("self_attn", "mixer"): tensor for name, tensor in weights.items()}


def stack(weights: Weights) -> Weights:
    """Return a model with a stack for each kind of matrices."""
    stacked = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    for layer in range(LAYERS):
        for kind in KINDS:
            matrices = [weights[name] for name in name_experts(layer, kind)]
            stacked[f"model.layers.{layer}.mlp.experts.{kind}"] = np.stack(matrices)
    return stacked


def transpose_stacks(stacked: Weights) -> Weights:
    """Return a model of stacks with transposed stacks."""
    transposed = {}
    for name, tensor in stacked.items():
        transposed[name] = np.ascontiguousarray(tensor.swapaxes(1, 2)) if tensor.ndim == 3 else tensor
    return transposed


def transpose(weights: Weights) -> Weights:
    """Return a model with transposed stacks."""
    return transpose_stacks(stack(weights))


def fuse(weights: Weights) -> Weights:
    """Return a model with gate and up in one stack."""
    stacked = stack(weights)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}.mlp.experts."
        gate, up = stacked.pop(f"{start}gate"), stacked.pop(f"{start}up")
        stacked[f"{start}gate_up"] = np.concatenate([gate, up], 1)
    return stacked


def fuse_transposed(weights: Weights) -> Weights:
    """Return a model with gate and up in one transposed stack."""
    return transpose_stacks(fuse(weights))


def interleave(weights: Weights) -> Weights:
    """Return a model with alternating rows of gate and up in one stack."""
    stacked = stack(weights)
    for layer in range(LAYERS):
        start = f"model.layers.{layer}.mlp.experts."
        rows = np.stack([stacked.pop(f"{start}gate"), stacked.pop(f"{start}up")], 2)
        stacked[f"{start}gate_up"] = rows.reshape(EXPERTS, -1, rows.shape[-1])
    return stacked


def diff(folder: Path, a: Weights, b: Weights, **options: Any) -> Report:
    """Write two models and compare them."""
    return syncheck.diff(write(folder / "a", a), write(folder / "b", b), options=syncheck.DiffOptions(**options))


@pytest.mark.parametrize("convert", [stack, transpose])
def test_a_stack_is_mapped(tmp_path: Path, convert: Callable[[Weights], Weights]) -> None:
    """Stacks are undecided under an inferred map in both orders, in sync if the user accepts it or passes the map."""
    separate = make_separate()
    file = str(tmp_path / "map.toml")
    for a, b in ((separate, convert(separate)), (convert(separate), separate)):
        report = diff(tmp_path, a, b, write_map=file)
        assert (report.exit_code, report.counts.not_compared, report.groups[-1].evidence.inferred) == (2, 0, True)
        assert diff(tmp_path, a, b, map=file).exit_code == 0
    assert diff(tmp_path, separate, convert(separate), accept_inferred=True).exit_code == 0


@pytest.mark.parametrize("convert", [fuse, fuse_transposed, interleave])
def test_a_fused_stack_is_undecided(tmp_path: Path, convert: Callable[[Weights], Weights]) -> None:
    """Stacks with two matrices of each expert are not compared, and a map decides."""
    separate = make_separate()
    for a, b in ((separate, convert(separate)), (convert(separate), separate)):
        report = diff(tmp_path, a, b)
        refused = {tensor.detail for tensor in report.tensors}
        assert (report.exit_code, report.findings, len(refused)) == (2, (), LAYERS)


def test_a_map_of_a_fused_stack(tmp_path: Path) -> None:
    """A map that states the order of the matrices in a fused stack decides, also if gate and up are exchanged."""
    start = "model.layers.{i}.mlp.experts."
    rules = {"gate_up": ["gate", "up"], "down": ["down"]}
    lines = []
    for stacked, kinds in rules.items():
        parts = [f"{start}{{e}}.{kind}_proj.weight" for kind in kinds]
        lines += ["[[rule]]", f'name = "{start}{stacked}"', f"parts = {parts}"]
    file = tmp_path / "map.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    separate = make_separate()
    assert diff(tmp_path, separate, fuse(separate), map=str(file)).exit_code == 0
    gate, up = name_experts(0, "gate")[0], name_experts(0, "up")[0]
    exchanged = separate | {gate: separate[up], up: separate[gate]}
    assert diff(tmp_path, separate, fuse(exchanged), map=str(file)).exit_code == 1


def change_element(weights: Weights) -> Weights:
    """Return weights with one other element."""
    name = name_experts(1, "up")[2]
    changed = weights[name].copy()
    changed[3, 4] += 1
    return weights | {name: changed}


def exchange(weights: Weights) -> Weights:
    """Return weights with two experts exchanged."""
    first, second, _ = name_experts(0, "gate")
    return weights | {first: weights[second], second: weights[first]}


def repeat(weights: Weights) -> Weights:
    """Return weights with one expert in the place of another one."""
    first, second, _ = name_experts(0, "gate")
    return weights | {second: weights[first]}


@pytest.mark.parametrize("change", [change_element, exchange, repeat])
@pytest.mark.parametrize("convert", [stack, transpose])
def test_differences_in_a_stack(
    tmp_path: Path, convert: Callable[[Weights], Weights], change: Callable[[Weights], Weights]
) -> None:
    """Other values, and experts at other places of a stack, are out of sync."""
    separate = make_separate()
    assert diff(tmp_path, separate, convert(change(separate))).exit_code == 1


@pytest.mark.parametrize("change", [change_element, repeat])
@pytest.mark.parametrize("convert", [fuse, fuse_transposed, interleave])
def test_other_rows_in_a_fused_stack(
    tmp_path: Path, convert: Callable[[Weights], Weights], change: Callable[[Weights], Weights]
) -> None:
    """Matrices whose rows a fused stack lacks are missing."""
    separate = make_separate()
    report = diff(tmp_path, separate, convert(change(separate)))
    assert (report.exit_code, list_fields(report.findings, "code")) == (1, ["SYN101"])


def test_another_name_beside_a_stack_is_missing(tmp_path: Path) -> None:
    """A stack does not map the names of other tensors."""
    separate = make_separate()
    stacked = stack(separate)
    stacked["model.final.weight"] = stacked.pop("model.norm.weight")
    report = diff(tmp_path, separate, stacked)
    assert report.exit_code == 1
    assert {name for finding in report.findings for name in finding.tensors} == {
        "model.final.weight",
        "model.norm.weight",
    }
