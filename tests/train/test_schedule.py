"""The learning rate: warm-up, decay, and what --lr-scale makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scenarios import SMALL

from train.errors import UserError
from train.job import prepare
from train.schedule import LearningRate, Plan, compute_lr_scale
from train.settings import Settings, check

if TYPE_CHECKING:
    from train.launch import RankContext

PLAN = Plan("ddp", epochs=10, steps=100, steps_per_epoch=10)


def rates(shares: int = 1, **changes: Any) -> list[float]:
    """Give the learning rates of all steps of 100, from a typed rate of 1."""
    rate = LearningRate(Settings(lr=1.0, **changes), PLAN, shares)
    return [rate.at(step) for step in range(PLAN.steps)]


def test_default_is_what_it_was() -> None:
    """Without options the rate of each step is, bit by bit, the typed one times a tenth's rise and half a cosine."""
    assert rates() == [compute_lr_scale(step, 100) for step in range(100)]


@pytest.mark.parametrize(("scale", "peak"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scale_is_relative_to_one_process(scale: str, peak: float) -> None:
    """Over four shares of the global batch the whole schedule is four times, or twice, as high."""
    assert rates(4, lr_scale=scale) == [peak * rate for rate in rates()]
    assert rates(1, lr_scale=scale) == rates()


@pytest.mark.parametrize(
    ("changes", "rise"),
    [({"warmup_steps": 0}, 0), ({"warmup_steps": 25}, 25), ({"warmup_epochs": 0.5}, 5), ({"warmup_steps": 100}, 100)],
)
def test_warm_up_has_the_length_given(changes: dict[str, Any], rise: int) -> None:
    """The rate rises over as many steps, linearly to its peak; constant stays there, cosine falls from there."""
    for kind in ("constant", "cosine"):
        found = rates(schedule=kind, **changes)
        assert found[:rise] == pytest.approx([(step + 1) / rise for step in range(rise)])
        assert found[rise:] == sorted(found[rise:], reverse=True)
        assert rise == 100 or found[rise] == 1
    assert set(rates(schedule="constant", **changes)[rise:]) <= {1.0}


def test_warm_up_must_end_within_the_run() -> None:
    """One that is longer than the run would never come to the rate asked for, and is refused with both numbers."""
    with pytest.raises(UserError, match="the warm-up takes 101 steps, but the run has 100"):
        rates(warmup_steps=101)
    with pytest.raises(UserError, match="--warmup-steps and --warmup-epochs: "):
        check(Settings(warmup_steps=1, warmup_epochs=1), 1)


@pytest.mark.syncheck(ranks=2)
def test_ranks_and_replicas_count(ctx: RankContext) -> None:
    """Two ranks double the rate on both; so do the two replicas of dp, which are one process."""
    job = prepare(Settings(method="ddp", width=4, lr_scale="linear", max_steps=1), ctx)
    assert job.rate.peak == 0.2
    from train.launch import RankContext as Alone

    assert prepare(Settings(method="dp", width=4, lr_scale="linear", max_steps=1), Alone()).rate.peak == 0.2
    assert SMALL.lr_scale == "none"
