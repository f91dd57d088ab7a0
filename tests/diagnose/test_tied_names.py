"""Both names of a tied weight have one finding, with correct numbers of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import find_all, list_fields, list_names
from test_tied_averages import Tied
from torch import nn

import syncheck
from syncheck.diagnose.statements import Common

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.records import Group

STEPS = 5


def train(path: Path, rank: int, fault: str, *, cloned: bool = False) -> None:
    """Train with the gradients of all ranks; rank 1 has a fault at the third step."""
    torch.manual_seed(0)
    model = Tied()
    if rank == 1 and fault == "frozen":
        model.frozen.data += torch.rand(10, 4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    torch.manual_seed(1)
    for step in range(STEPS):
        words = torch.randint(10, (16,))
        nn.functional.cross_entropy(model(words), (words + 1) % 10).backward()
        if fault == "skipped" and (rank, step) == (1, 2):
            optimizer.zero_grad()
            continue
        if fault == "lost" and (rank, step) == (1, 2):
            optimizer.state.clear()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: tensor.clone() if cloned else tensor for name, tensor in model.state_dict().items()}
    if rank == 1 and fault == "embed alone" and cloned:
        weights["embed.weight"] += 1
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, path / f"rank{rank}.pth")


def compare(path: Path, fault: str, ranks: int, **options: Any) -> Group:
    """Compare ranks of which the second has a fault."""
    for rank in range(ranks):
        train(path, rank, fault, **options)
    (group,) = syncheck.compare(path).groups
    return group


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", ["skipped", "lost"])
@pytest.mark.parametrize("cloned", [False, True], ids=["one memory", "two copies"])
def test_a_single_finding(tmp_path: Path, ranks: int, fault: str, cloned: bool) -> None:
    """A skipped step or a lost state has no second finding for the second name of the weight."""
    group = compare(tmp_path, fault, ranks, cloned=cloned)
    (finding,) = [finding for finding in group.findings if finding.severity != "info"]
    assert finding.code in ("SYN214", "SYN215")
    assert {"embed.weight", "head.weight"} <= set(finding.tensors)
    counts = list_fields(find_all(finding.facts, code=Common.PARAMETERS), "parameters")
    # `frozen` agrees. If the optimizer numbers its parameters, nothing shows that two copies are one parameter.
    assert list_fields(counts, "count", "total") == [(4, 5) if cloned else (3, 4)]


def test_a_frozen_parameter(tmp_path: Path) -> None:
    """A frozen parameter with other values keeps its own finding beside the tied weight."""
    group = compare(tmp_path, "frozen", 2)
    assert all("head.weight" in finding.tensors for finding in group.findings if "embed.weight" in finding.tensors)
    assert any("frozen" in finding.tensors for finding in group.findings)


def test_separate_copies_that_differ(tmp_path: Path) -> None:
    """If only one of two copies differs, the names are not one parameter."""
    group = compare(tmp_path, "embed alone", 2, cloned=True)
    assert set(list_names(group.tensors)) == {"embed.weight"}
    assert all("head.weight" not in finding.tensors for finding in group.findings)
