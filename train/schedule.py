"""The plan of a run, its progress, and the learning rate of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.errors import UserError
from train.metrics import MetricSums
from train.option import LARGEST
from train.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

    from train.settings import Settings

# Default fraction of steps for the warm-up.
WARM_UP = 0.1
# Factors of --lr-scale, by the number of shares of the global batch.
# linear: Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 2.1.
# sqrt: Krizhevsky 2014, https://arxiv.org/abs/1404.5997, section 5: keeps the variance of the gradient constant.
SCALES = {"none": lambda _: 1.0, "linear": float, "sqrt": math.sqrt}
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class Plan:
    """The length of a run: its name, epochs, optimizer steps in total and per epoch."""

    run: str
    epochs: int
    steps: int
    steps_per_epoch: int


def is_due(step: int, every: int | None) -> bool:
    """Return whether something that happens every so many steps happens after this step. every: None for never."""
    return every is not None and step % every == 0


class Position:
    """The progress of a run.

    step: optimizer steps done. epoch: the current epoch, counted from 1. in_epoch: steps done in this epoch.
    metric_sums: this rank's sums in this epoch.
    """

    def __init__(self, device: torch.device, task: Task = CLASSIFICATION) -> None:
        self.step = 0
        self.epoch = 1
        self.in_epoch = 0
        self.metric_sums = MetricSums(device, task)

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.epoch += 1
        self.in_epoch = 0
        self.metric_sums.totals.zero_()


class LearningRate:
    """The learning rate of each step: a linear warm-up to the peak, then the schedule.

    shares: number of parts of the global batch, one per rank or per replica of dp. Raises UserError if the warm-up is
    longer than the run, or if the rate exceeds float32.
    """

    def __init__(self, settings: Settings, plan: Plan, shares: int) -> None:
        self.plan, self.kind = plan, settings.schedule
        self.peak = settings.lr * SCALES[settings.lr_scale](shares)
        if self.peak > LARGEST:
            raise UserError(f"--lr {settings.lr:g}: the learning rate would be {self.peak:g}, which exceeds float32")
        rise: float | None = settings.warmup_steps
        if settings.warmup_epochs is not None:
            rise = settings.warmup_epochs * plan.steps_per_epoch
        if rise is not None and (math.isinf(rise) or round(rise) > plan.steps):
            option = "--warmup-steps" if settings.warmup_epochs is None else "--warmup-epochs"
            raise UserError(f"{option}: the warm-up takes {rise:g} steps, but the run has {plan.steps}; shorten it")
        self.rise = None if rise is None else round(rise)

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return self.peak * compute_lr_scale(step, self.plan.steps, self.rise, self.kind)


def compute_lr_scale(step: int, steps: int, rise: int | None = None, kind: str = "cosine") -> float:
    """Return the factor of the peak learning rate: a linear warm-up to 1, then half a cosine to 0, or constant.

    step: 0 to steps - 1. rise: warm-up steps, by default a tenth of all steps.
    """
    if rise is None:
        rise = max(1, int(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    if kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
