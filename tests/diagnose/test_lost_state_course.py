"""A lost momentum is the cause of the differences at later steps, which SGD's state alone does not show."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import list_failing
from torch import nn

import syncheck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

LOST_AT = 6


def train(
    folder: Path,
    saved: Sequence[int],
    *,
    ranks: int = 3,
    lost: Sequence[int] = (1,),
    odd_gradients: Callable[[int, int, Any], None] = lambda rank, step, model: None,
    make: Callable[[Any], Any] = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
) -> dict[int | None, list[tuple[str, str, tuple[int, ...]]]]:
    """Train replicas with equal gradients, and save some steps. Return code, certainty and ranks of the causes by step.

    lost: ranks whose optimizer loses its state after step LOST_AT.
    odd_gradients: called with rank, step and model before each step.
    """
    torch.manual_seed(3)
    first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    models = [copy.deepcopy(first) for _ in range(ranks)]
    optimizers = [make(model.parameters()) for model in models]
    target = torch.randn(8, 4)
    for step in range(1, max(saved) + 1):
        inputs = torch.randn(ranks, 16, 8)
        losses = [
            nn.functional.mse_loss(model(batch), batch @ target) for model, batch in zip(models, inputs, strict=True)
        ]
        gradients = [
            torch.autograd.grad(loss, [*model.parameters()]) for loss, model in zip(losses, models, strict=True)
        ]
        means = [torch.stack(of_parameter).mean(0) for of_parameter in zip(*gradients, strict=True)]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for parameter, mean in zip(model.parameters(), means, strict=True):
                parameter.grad = mean.clone()
            odd_gradients(rank, step, model)
            optimizer.step()
            if step == LOST_AT and rank in lost:
                optimizer.state.clear()
            if step in saved:
                content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(content, folder / f"step{step}_rank{rank}.pth")
    causes: dict[int | None, list[tuple[str, str, tuple[int, ...]]]] = {}
    for group in syncheck.compare(folder).groups:
        causes[group.step] = [(finding.code, finding.certainty, finding.ranks) for finding in list_failing(group)]
    return causes


@pytest.mark.parametrize(
    ("ranks", "lost", "saved"),
    [
        (3, (1,), (6, 7, 12)),
        (2, (1,), (6, 7)),
        (4, (3,), (5, 6, 20)),
        (5, (0, 2), (6, 8, 10)),
    ],
)
def test_later_steps_have_the_cause_of_the_step_with_the_loss(
    tmp_path: Path, ranks: int, lost: Any, saved: Any
) -> None:
    """If a step proves that ranks lost their state, it explains the differences of these ranks at later steps."""
    causes = train(tmp_path, saved, ranks=ranks, lost=lost)
    for step in saved:
        certainty = "proved" if step == LOST_AT else "likely"
        assert causes[step] == ([] if step < LOST_AT else [("SYN215", certainty, lost)])


def test_other_ranks_have_another_cause(tmp_path: Path) -> None:
    """If other ranks than those without state differ, the loss explains nothing."""

    def add_noise(rank: int, step: int, model: Any) -> None:
        if rank == 2 and step > LOST_AT:
            for parameter in model.parameters():
                parameter.grad += torch.randn_like(parameter)

    causes = train(tmp_path, (6, 7, 9), ranks=4, odd_gradients=add_noise)
    assert causes[LOST_AT] == [("SYN215", "proved", (1,))]
    assert [code for code, _, _ in causes[9]] != ["SYN215"]


def test_a_loss_that_no_step_shows_is_a_possible_cause(tmp_path: Path) -> None:
    """Without a step that shows the missing state, SYN215 is no more than another possible cause."""
    causes = train(tmp_path, (7, 9))
    assert [(code, certainty) for code, certainty, _ in causes[7]] != [("SYN215", "likely")]


def test_a_difference_before_the_loss_has_another_cause(tmp_path: Path) -> None:
    """If parameters differed before, the loss of state is not the cause of their difference."""

    def add_noise(rank: int, step: int, model: Any) -> None:
        if rank == 1:
            for parameter in model.parameters():
                parameter.grad += torch.randn_like(parameter)

    causes = train(tmp_path, (5, 6, 9), ranks=4, odd_gradients=add_noise)
    assert "SYN215" not in [code for code, _, _ in causes[9]]
