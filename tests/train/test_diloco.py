"""DiLoCo: its outer step equals a computation by hand, and ranks are equal exactly at the steps in the metadata."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from support.listings import list_codes, list_rank_files
from support.scenarios import SMALL, differing, load, run, trained
from support.states import find_largest_difference

import syncheck
from train.data import load_data
from train.models import build_model
from train.schedule import compute_lr_scale, set_learning_rate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

DILOCO = replace(SMALL, method="diloco", model="convnet", width=None, average_every=3, shuffle=False, max_steps=9)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    "settings",
    [
        replace(DILOCO, batch_size=35),  # uneven shares, and equal ranks after the ninth step
        replace(DILOCO, max_steps=8, optimizer="adamw", lr=0.005, outer_lr=0.5, outer_momentum=0.0),
    ],
    ids=["sgd, after an outer step", "adamw, between outer steps"],
)
def test_diloco_equals_training_by_hand(ctx: RankContext, settings: Settings) -> None:
    """The run ends within rounding of models trained one after the other, with the outer step by its formula."""
    actual = trained(ctx, replace(settings, save_per_rank=False)).method.module.state_dict()
    expected = train_by_hand(settings, ctx.world_size)[ctx.rank].state_dict()
    assert find_largest_difference(expected, actual) < 5e-6


def train_by_hand(settings: Settings, ranks: int) -> list[nn.Module]:
    """Train one model per rank in this process, and apply algorithm 1 of the paper after each N-th step."""
    torch.manual_seed(settings.seed)
    models = [build_model(settings.model, 1, 10, settings.width)]
    models += [deepcopy(models[0]) for _ in range(ranks - 1)]
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.optimizer]
    momentum = {"momentum": settings.momentum} if settings.optimizer == "sgd" else {}
    optimizers = [kind(m.parameters(), lr=1.0, weight_decay=settings.weight_decay, **momentum) for m in models]
    outer_lr = 0.7 if settings.outer_lr is None else settings.outer_lr
    outer_momentum = 0.9 if settings.outer_momentum is None else settings.outer_momentum
    start = flatten(models[0])
    velocity = torch.zeros_like(start)
    x, y = load_data("digits", None, None).train[:]
    for step in range(settings.max_steps or 0):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            samples = slice(step * settings.batch_size + rank, (step + 1) * settings.batch_size, ranks)
            loss = F.cross_entropy(model(x[samples]), y[samples], reduction="sum") / settings.batch_size * ranks
            loss.backward()
            set_learning_rate(optimizer, settings.lr * compute_lr_scale(step, settings.max_steps or 0))
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % (settings.average_every or 0) == 0:
            change = start - torch.stack([flatten(model) for model in models]).mean(0)
            velocity = outer_momentum * velocity + change
            start = start - outer_lr * (change + outer_momentum * velocity)
            for model in models:
                torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
    return models


def flatten(model: nn.Module) -> Tensor:
    """Return all parameters as one vector; a copy."""
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.syncheck(ranks=2)
def test_ranks_are_equal_at_outer_steps(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Parameters agree after each third step only, and syncheck reports other differences as expected (SYN241).

    A weight that still differs after an outer step is no longer expected.
    """
    out = syncheck_rank.shared
    run(ctx, replace(DILOCO, momentum=0.0, max_steps=7, save_every=1, out=out))
    verdicts = []
    for step in range(1, 8):
        pair = list_rank_files(out / "history" / "diloco" / f"step_{step}", "rank_{}.pth", 2)
        assert load(pair[1])["syncheck"]["averaging"] == {
            "period": 3,
            "warmup_steps": 0,
            "last_step": step // 3 * 3,
        }
        (group,) = syncheck.compare(*pair).groups
        verdicts.append(list_codes(group.findings))
        assert (not differing(*pair)) is (step in (3, 6))
        if step == 6 and ctx.rank == 0:
            content = load(pair[1])
            content["model"]["conv1.weight"][0, 0, 0, 0] += 1
            torch.save(content, out / "changed_rank1.pth")
            (group,) = syncheck.compare(pair[0], out / "changed_rank1.pth").groups
            assert group.verdict == "out_of_sync"
            assert "SYN241" not in list_codes(group.findings)
    assert verdicts == [["SYN241"], ["SYN241"], [], ["SYN241"], ["SYN241"], [], ["SYN241"]]
