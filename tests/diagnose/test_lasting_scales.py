"""A clip on some ranks from a late step on, with SGD's momentum: several steps show it, and one step does not."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import get_failing
from torch import nn

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from syncheck.records import Finding

    Change = Callable[[int, int, Any], None]

START = 30


def clip(rank: int, step: int, model: Any) -> None:
    """Clip the averaged gradients of rank 1."""
    if rank == 1 and step >= START:
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)


def shrink(rank: int, step: int, model: Any) -> None:
    """Divide the averaged gradients of rank 1."""
    if rank == 1 and step >= START:
        for parameter in model.parameters():
            parameter.grad *= 0.02


def clip_two(rank: int, step: int, model: Any) -> None:
    """Clip the averaged gradients of two ranks."""
    if rank in (1, 2):
        clip(1, step, model)


def clip_by_the_loss(rank: int, step: int, model: Any) -> None:
    """Clip the averaged gradients of rank 1 with a limit that changes from step to step."""
    if rank == 1 and step >= START:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01 + 0.02 * (step % 3))


def add_noise(rank: int, step: int, model: Any) -> None:
    """Add noise to the averaged gradients of rank 1."""
    if rank == 1 and step >= START:
        for parameter in model.parameters():
            parameter.grad += torch.randn_like(parameter) * parameter.grad.std()


def clip_once(rank: int, step: int, model: Any) -> None:
    """Clip the averaged gradients of rank 1 at one step only."""
    if step == START:
        clip(rank, step, model)


def train(folder: Path, change: Change, saved: Sequence[int], *, ranks: int = 4) -> list[Finding]:
    """Train replicas with averaged gradients, and return the only cause of each step out of sync."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
    models = [copy.deepcopy(first) for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    target = torch.randn(12, 4)
    for step in range(1, max(saved) + 1):
        gradients = []
        for model in models:
            inputs = torch.randn(16, 12)
            loss = nn.functional.cross_entropy(model(inputs), (inputs @ target).argmax(1))
            gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
        means = [torch.stack(of_parameter).mean(0) for of_parameter in zip(*gradients, strict=True)]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean.clone()
            change(rank, step, model)
            optimizer.step()
            if step in saved:
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(content, folder / f"step{step}_rank{rank}.pth")
    groups = syncheck.compare(folder).groups
    return [get_failing(group) for group in groups if group.verdict == "out_of_sync"]


@pytest.mark.parametrize("change", [clip, shrink, clip_two, clip_by_the_loss])
@pytest.mark.parametrize("saved", [(29, 30, 31, 40), (30, 45), (20, 33, 36, 50)])
def test_several_steps_show_a_scale(tmp_path: Path, change: Change, saved: Any) -> None:
    """If the momenta of some ranks become shorter and shorter, every step is SYN213, from the first step on."""
    ranks = (1, 2) if change is clip_two else (1,)
    findings = train(tmp_path, change, saved, ranks=5)
    assert {(finding.code, finding.certainty, finding.ranks) for finding in findings} == {
        ("SYN213", "consistent", ranks)
    }


@pytest.mark.parametrize("change", [clip, shrink])
def test_a_single_step_names_the_scale(tmp_path: Path, change: Change) -> None:
    """One step does not show the cause, but a scale is the finding or a possible cause."""
    (finding,) = train(tmp_path, change, (29, 36))
    assert "SYN213" in (finding.code, *finding.alternatives)


@pytest.mark.parametrize("change", [add_noise, clip_once])
def test_other_changes_are_no_lasting_scale(tmp_path: Path, change: Change) -> None:
    """Noise and a clip at a single step do not make the momenta shorter and shorter."""
    findings = train(tmp_path, change, (29, 30, 31, 40, 50))
    assert "SYN213" not in {finding.code for finding in findings}
