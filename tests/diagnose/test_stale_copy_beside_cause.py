"""An averaged copy that is stale on one rank, while the model of another rank differs for another cause."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest
import torch
from support.listings import index_by, list_codes, list_failing
from torch import nn

import syncheck

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from syncheck.records import Finding

RANKS = 4


def train(folder: Path, fault: str, decays: Mapping[int, float]) -> list[Finding]:
    """Train replicas with averaged gradients and a fault on rank 1, and return the causes of the last step.

    decays: of the averaged copies of some ranks; 0.99 on the others.
    """
    torch.manual_seed(1)
    first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    models = [copy.deepcopy(first) for _ in range(RANKS)]
    averages = [copy.deepcopy(first) for _ in range(RANKS)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(1, 31):
        gradients = []
        for model in models:
            loss = model(torch.randn(16, 8)).square().mean()
            gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
        means = [torch.stack(of_parameter).mean(0) for of_parameter in zip(*gradients, strict=True)]
        for rank, (model, optimizer, average) in enumerate(zip(models, optimizers, averages, strict=True)):
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean * (0.1 if fault == "scale" and rank == 1 else 1)
            is_skipped = fault == "skipped step" and rank == 1 and step == 20
            if not is_skipped:
                optimizer.step()
            decay = decays.get(rank, 0.99)
            for of_average, of_model in zip(average.parameters(), model.parameters(), strict=True):
                of_average.data.mul_(decay).add_(of_model.data, alpha=1 - decay)
    for rank, (model, optimizer, average) in enumerate(zip(models, optimizers, averages, strict=True)):
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": average.state_dict()}
        torch.save({**content, "step": 30}, folder / f"m_rank{rank}.pth")
    return list_failing(syncheck.compare(folder))


@pytest.mark.parametrize(("fault", "code"), [("scale", "SYN213"), ("skipped step", "SYN214")])
@pytest.mark.parametrize("decays", [{3: 0.9}, {0: 1.0}], ids=["another decay", "not updated"])
def test_two_causes_on_two_ranks(tmp_path: Path, fault: str, code: str, decays: dict[int, float]) -> None:
    """The copy of a rank whose model agrees with other ranks is stale, beside the cause of the other rank."""
    findings = index_by(train(tmp_path, fault, decays), "code")
    assert set(findings) == {code, "SYN219"}
    assert (findings[code].ranks, findings["SYN219"].ranks) == ((1,), tuple(decays))


@pytest.mark.parametrize("fault", ["scale", "skipped step"])
def test_a_copy_that_follows_the_model_is_not_stale(tmp_path: Path, fault: str) -> None:
    """The copy of a rank whose model differs follows from the cause of the difference."""
    assert "SYN219" not in list_codes(train(tmp_path, fault, {}))
