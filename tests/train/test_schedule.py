"""The learning rate: warm-up, decay and --lr-scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from support.scenarios import SMALL

from train.engine import Job
from train.errors import UserError
from train.schedule import LearningRate, Plan, compute_lr_scale
from train.settings import Settings, check

if TYPE_CHECKING:
    from train.launch import RankContext

PLAN = Plan("ddp", epochs=10, steps=100, steps_per_epoch=10)


def rates(shares: int = 1, **changes: Any) -> list[float]:
    """Return the learning rates of all 100 steps for --lr 1."""
    rate = LearningRate(Settings(lr=1.0, **changes), PLAN, shares)
    return [rate.at(step) for step in range(PLAN.steps)]


def test_default_schedule() -> None:
    """By default, each step's rate is exactly --lr times `compute_lr_scale` with its default warm-up and cosine."""
    assert rates() == [compute_lr_scale(step, 100) for step in range(100)]


@pytest.mark.parametrize(("scale", "peak"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scale_is_relative_to_one_process(scale: str, peak: float) -> None:
    """With four shares of the global batch, linear multiplies the schedule by 4 and sqrt by 2."""
    assert rates(4, lr_scale=scale) == [peak * rate for rate in rates()]
    assert rates(1, lr_scale=scale) == rates()


@pytest.mark.parametrize(
    ("changes", "rise"),
    [({"warmup_steps": 0}, 0), ({"warmup_steps": 25}, 25), ({"warmup_epochs": 0.5}, 5), ({"warmup_steps": 100}, 100)],
)
def test_warm_up_has_the_requested_length(changes: dict[str, Any], rise: int) -> None:
    """The rate rises linearly to its peak during the warm-up; then constant keeps the rate and cosine lowers it."""
    for kind in ("constant", "cosine"):
        actual = rates(schedule=kind, **changes)
        assert actual[:rise] == pytest.approx([(step + 1) / rise for step in range(rise)])
        assert actual[rise:] == sorted(actual[rise:], reverse=True)
        assert rise == 100 or actual[rise] == 1
    assert set(rates(schedule="constant", **changes)[rise:]) <= {1.0}


def test_warm_up_must_end_within_the_run() -> None:
    """A warm-up longer than the run is refused with both numbers, because it would never reach --lr."""
    with pytest.raises(UserError, match="the warm-up takes 101 steps, but the run has 100"):
        rates(warmup_steps=101)
    with pytest.raises(UserError, match="--warmup-steps and --warmup-epochs: "):
        check(Settings(warmup_steps=1, warmup_epochs=1), 1)


@pytest.mark.syncheck(ranks=2)
def test_ranks_and_replicas_count(ctx: RankContext) -> None:
    """With --lr-scale linear, two ranks double the rate, and so do two dp replicas in one process."""
    job = Job(Settings(method="ddp", width=4, lr_scale="linear", max_steps=1), ctx)
    assert job.rate.peak == 0.2
    from train.launch import RankContext as Alone

    assert Job(Settings(method="dp", width=4, lr_scale="linear", max_steps=1), Alone()).rate.peak == 0.2
    assert SMALL.lr_scale == "none"
