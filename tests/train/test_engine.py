"""The training loop: its plan, its schedule, and evaluations without side effects."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.listings import list_fields
from support.scenarios import SMALL, load, run
from support.states import copy_values, list_differing
from torch import nn
from torch.utils.data import TensorDataset

from train.data import load_data
from train.data.loading import evaluation_batches
from train.engine import train
from train.errors import UserError
from train.launch import RankContext
from train.methods.single import Single
from train.metrics import Score, evaluate
from train.models import build_model
from train.parts import build_optimizer, check_batchnorm, make_plan
from train.recorders.base import Recorder
from train.schedule import compute_lr_scale
from train.settings import Settings

if TYPE_CHECKING:
    from syncheck.testing import Rank


def test_single_learns_the_digits() -> None:
    """After three epochs in one process, accuracy on the test images is above 90 %."""
    result = train(Settings(epochs=3), RankContext(), Recorder())
    assert result.test.accuracy > 0.9
    assert (result.epochs, result.steps, result.test.samples, result.saved) == (3, 132, 360, ())


@pytest.mark.slow
def test_adamw_learns_too() -> None:
    """After two epochs of AdamW with its default learning rate, accuracy on the test images is above 80 %."""
    result = train(Settings(epochs=2, width=8, optimizer="adamw", lr=0.005), RankContext(), Recorder())
    assert result.test.accuracy > 0.8


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ((1.0, 1.0, 1.0), None),
        ((math.inf, 1.0, 1.0), None),
        ((math.inf, 1.0, math.nan), 3),
        ((1.0, math.inf, math.nan), 2),
    ],
)
def test_divergence_ignores_a_recovered_loss(
    monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], since: int | None
) -> None:
    """`diverged` is the epoch since which the loss is not finite, or None if the loss has recovered."""
    scores = iter([Score(loss, 0.5, 10) for loss in losses])
    monkeypatch.setattr("train.engine.evaluate", lambda *_: next(scores))
    assert train(Settings(epochs=3, width=4, limit_train=32), RankContext(), Recorder()).diverged == since


def test_evaluation_changes_nothing() -> None:
    """An evaluation changes no parameter or buffer, and the model returns to training mode."""
    model = build_model("resnet8", 1, 10, 4)
    data = load_data("digits", None, None)
    before = copy_values(model.state_dict())
    method = Single(Settings(), RankContext())
    method.wrap(model)
    evaluate(method, evaluation_batches(data.test, RankContext()), RankContext())
    assert not list_differing(model.state_dict(), before)
    assert model.training


@pytest.mark.syncheck(ranks=2)
def test_scores_are_exact_over_ranks(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Both ranks report equal scores that count each sample once and equal the scores of the saved weights."""
    # Ranks train on 17 and 16 of 33 samples per step, so a mean of their means would be wrong.
    settings = replace(SMALL, sync_bn=True, batch_size=33, max_steps=20, out=syncheck_rank.shared)
    result = run(ctx, settings)
    assert ctx.gather((result.trained, result.test)) == [(result.trained, result.test)] * 2
    assert result.trained.samples == 20 * 33
    model = build_model("resnet8", 1, 10, 4)
    model.load_state_dict(load(settings.out / "ddp-syncbn_rank1.pth")["model"])
    method = Single(Settings(), RankContext())
    method.wrap(model)
    alone = evaluate(method, evaluation_batches(load_data("digits", None, None).test, RankContext()), RankContext())
    assert (alone.samples, alone.accuracy) == (result.test.samples, result.test.accuracy)
    assert alone.loss == pytest.approx(result.test.loss, rel=1e-6)  # summed in another order


def test_evaluation_shares_cover_all_samples() -> None:
    """Seven ranks evaluate 51 or 52 samples each, which add up to all 360 test samples."""
    data = load_data("digits", None, None)
    shares = [evaluation_batches(data.test, RankContext(rank, 7)) for rank in range(7)]
    counts = [sum(map(len, list_fields(share, 1))) for share in shares]
    assert counts == [52, 52, 52, 51, 51, 51, 51]


@pytest.mark.parametrize(("samples", "world_size", "forwards"), [(1025, 2, 2), (1024, 2, 1), (360, 7, 1), (7, 7, 1)])
def test_ranks_evaluate_with_equally_many_forwards(samples: int, world_size: int, forwards: int) -> None:
    """All ranks make the same number of forwards, even if one share is just larger than a full batch."""
    data = TensorDataset(torch.arange(samples))
    for rank in range(world_size):
        sizes = [len(x) for (x,) in evaluation_batches(data, RankContext(rank, world_size))]
        assert len(sizes) == forwards
        assert 0 < max(sizes) <= 512


def test_evaluation_needs_a_sample_for_each_rank() -> None:
    """More ranks than test samples raise an error with both numbers."""
    with pytest.raises(UserError, match="2 test samples for 3 ranks: "):
        evaluation_batches(TensorDataset(torch.arange(2)), RankContext(0, 3))


@pytest.mark.parametrize(
    ("limits", "epochs", "steps"),
    [({"epochs": 3}, 3, 132), ({"epochs": 3, "max_steps": 45}, 2, 45), ({"epochs": 1, "max_steps": 500}, 1, 44)],
)
def test_plan_ends_at_the_first_limit(limits: dict[str, int], epochs: int, steps: int) -> None:
    """A run ends after --epochs or --max-steps, whichever comes first."""
    plan = make_plan(Settings(**limits), samples=1437, steps_per_epoch=44)
    assert (plan.epochs, plan.steps) == (epochs, steps)


def test_plan_needs_one_full_batch() -> None:
    """A batch larger than the training data raises an error with both numbers."""
    with pytest.raises(UserError, match="--batch-size 32 is more than the 20 training samples"):
        make_plan(Settings(), samples=20, steps_per_epoch=0)


def test_schedule_rises_and_falls() -> None:
    """The learning rate rises over the first tenth of the steps, then falls from its peak to nearly zero."""
    rates = [compute_lr_scale(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert compute_lr_scale(0, 1) == 1


@pytest.mark.parametrize(
    ("settings", "world_size", "refused"),
    [
        (Settings(batch_size=3), 2, True),
        (Settings(batch_size=4), 2, False),
        (Settings(batch_size=2, sync_bn=True), 2, False),
        (Settings(batch_size=1), 1, True),
    ],
    ids=str,
)
def test_batchnorm_needs_two_samples_per_rank(settings: Settings, world_size: int, refused: bool) -> None:
    """A share of one sample is refused only if a BatchNorm layer would normalize the sample alone."""
    check_batchnorm(nn.Linear(2, 2), settings, world_size, 1)
    if refused:
        with pytest.raises(UserError, match="BatchNorm"):
            check_batchnorm(nn.BatchNorm2d(2), settings, world_size, 1)
    else:
        check_batchnorm(nn.BatchNorm2d(2), settings, world_size, 1)


def test_optimizer_takes_all_parameters_in_order() -> None:
    """The optimizer has all parameters in the order of the model, so the integer ids of its state follow this order."""
    for name, kind in (("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)):
        settings = Settings(optimizer=name)
        method = Single(settings, RankContext())
        model = method.wrap(build_model("resnet8", 1, 10, 4))
        optimizer = build_optimizer(settings, method)
        assert isinstance(optimizer, kind)
        (group,) = optimizer.param_groups
        assert all(a is b for a, b in zip(group["params"], model.parameters(), strict=True))


def test_evaluations_do_not_affect_dropout() -> None:
    """The number of evaluations does not affect training, even if the model draws random numbers for dropout."""
    settings = Settings(model="mnist_convnet", limit_train=32, epochs=2)
    results = [train(replace(settings, eval_every=every), RankContext(), Recorder()) for every in (1, 2)]
    assert results[0].trained == results[1].trained
