"""Rows of a fused tensor that a shift moved into another part are not lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.found_causes import compare, draw

from syncheck.diagnose.measures import parameters_of
from syncheck.diagnose.model_layouts import FusedOrder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    State = dict[str, torch.Tensor]

PARTS = ("q", "k", "v")
NAMES = [f"layers.1.attn.{part}_proj.weight" for part in PARTS]


def make_model() -> State:
    """Return a model with the parts of fused tensors."""
    model = {}
    for layer in range(3):
        for seed, part in enumerate(PARTS):
            model[f"layers.{layer}.attn.{part}_proj.weight"] = draw(24 if part == "q" else 12, 8, seed=9 * layer + seed)
    return model


def fuse(model: State) -> State:
    """Return the model with its parts fused."""
    fused = {}
    for layer in range(3):
        parts = [model[f"layers.{layer}.attn.{part}_proj.weight"] for part in PARTS]
        fused[f"blocks.{layer}.wqkv.weight"] = torch.cat(parts)
    return fused


def shift(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the operation that rolls the rows."""
    return lambda tensor: torch.roll(tensor, rows, 0)


def insert(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a row of zeros before all others, without its last row."""
    return torch.cat([torch.zeros(1, 8), tensor[:-1]])


def remove(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its first row, and with a row of zeros after all others."""
    return torch.cat([tensor[1:], torch.zeros(1, 8)])


CASES = [
    (shift(1), {"SYN305": {0, 1, 2}}),
    (shift(-3), {"SYN305": {0, 1, 2}}),
    (insert, {"SYN305": {0, 1}, "SYN318": {2}}),
    (remove, {"SYN305": {1, 2}, "SYN318": {0}}),
]


@pytest.mark.parametrize(("change", "expected"), CASES)
def test_only_rows_that_no_part_has_are_lost(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor], expected: dict[str, set[int]]
) -> None:
    """A shift of the whole fused tensor loses rows at its ends only."""
    model = make_model()
    fused = fuse(model)
    fused["blocks.1.wqkv.weight"] = change(fused["blocks.1.wqkv.weight"])
    findings, _ = compare(tmp_path, model, fused)
    found = {code: {NAMES.index(name) for name in finding.tensors} for code, finding in findings.items()}
    assert found == expected
    assert {finding.certainty for finding in findings.values()} == {"proved"}


def test_the_part_with_the_rows_is_named(tmp_path: Path) -> None:
    """The rows before a shift of two rows are those of the part before."""
    model = make_model()
    fused = fuse(model)
    fused["blocks.1.wqkv.weight"] = torch.roll(fused["blocks.1.wqkv.weight"], 2, 0)
    _, diffs = compare(tmp_path, model, fused)
    for name, holder in zip(NAMES, [*NAMES[1:], NAMES[0]], strict=True):
        parameters = parameters_of(diffs[name])
        assert (parameters["shift"], parameters["direction"], parameters["parts"]) == (2, "later", (holder,))


def test_rows_in_another_layer_are_lost(tmp_path: Path) -> None:
    """A tensor of another layer is no part of the fused tensor, although it has the row."""
    model = make_model()
    copy = {name: tensor.clone() for name, tensor in model.items()}
    copy[NAMES[0]] = insert(model[NAMES[0]])
    copy["layers.2.attn.q_proj.weight"][3] = model[NAMES[0]][-1]
    findings, _ = compare(tmp_path, model, copy)
    assert findings["SYN318"].tensors == (NAMES[0],)


def test_a_block_of_one_row_is_named_as_one_row(tmp_path: Path) -> None:
    """If both models have the fused tensor, the last row is a block of its own."""
    fused = fuse(make_model())
    name = "blocks.1.wqkv.weight"
    findings, _ = compare(tmp_path, fused, {**fused, name: torch.roll(fused[name], 1, 0)})
    (fact,) = findings["SYN305"].facts
    assert [block.code for block in fact.parameters["blocks"]] == [FusedOrder.ROW, FusedOrder.ROWS]
