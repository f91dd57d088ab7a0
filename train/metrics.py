"""Loss and accuracy, exact over all ranks: of an epoch of training, and on the test set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from train.mesh import gather_whole
from train.task import CLASSIFICATION, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from train.data.loading import Batches
    from train.launch import RankContext
    from train.methods.single import Method


SUMS = 4  # in MetricSums.totals


def replace_nonfinite(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with None for NaN and infinity.

    JSON has neither, and strict readers would refuse the whole document.
    """
    replaced = dict(record)
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            replaced[name] = None
    return replaced


@dataclass(frozen=True)
class Score:
    """The performance of a model.

    All are over the predictions of `task`, one per image, byte of a text, or number of a target. loss: mean loss.
    accuracy, top5: means of the counts of the task, for built-in tasks the fractions of correct predictions, and of
    classes among the five most probable; top5 is None with at most five classes. samples: number of predictions.
    """

    loss: float
    accuracy: float
    samples: int
    top5: float | None = None
    task: Task = field(default=CLASSIFICATION, compare=False, repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of the task by name; NaN for a metric that does not apply."""
        return self.task.compute(self.loss, (self.accuracy, math.nan if self.top5 is None else self.top5))

    @property
    def main(self) -> tuple[str, float]:
        """Return the name and value of the task's first metric."""
        name = next(iter(self.task.metrics))
        return name, self.metrics[name]

    def is_better(self, other: float | None) -> bool:
        """Return whether the first metric is better than another value of it."""
        name, value = self.main
        if other is None:
            return True
        if self.task.metrics[name]:  # higher is better
            return value > other
        return value < other

    def format(self, digits: int = 1, *, named: bool | None = None) -> str:
        """Format the first metric; named: with its name, by default unless it is accuracy, a percentage."""
        name, value = self.main
        is_percentage = name == "accuracy"
        number = f"{value:.4g}"
        if is_percentage:
            number = f"{value:.{digits}%}"
        if named is None:
            named = not is_percentage
        if named:
            return f"{name} {number}"
        return number


class MetricSums:
    """Accumulates sums rather than means, so that ranks and batches of different sizes are weighted correctly.

    The sums stay on the device, so adding does not wait for it. They are float64, which represents counts exactly.
    totals: [4] loss, first count of the task (correct predictions), predictions, second count (NaN if there is none).
    recent: [4] the same since the last `take`.
    """

    def __init__(self, device: torch.device, task: Task = CLASSIFICATION) -> None:
        self.task = task
        self.both = torch.zeros(SUMS, 2, dtype=torch.float64, device=device)
        self.totals, self.recent = self.both.unbind(1)  # views

    def add(self, loss_sum: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Add one batch. loss_sum: [] sum over the predictions."""
        # With --loss-parallel they are DTensors.
        loss, outputs = gather_whole(loss_sum.detach()), gather_whole(outputs.detach())
        counts = self.task.count(outputs, targets).double().flatten()
        first, second = counts[0], counts[1] if len(counts) > 1 else counts[0] * math.nan
        predictions = first.new_tensor(self.task.count_predictions(targets))
        self.add_sums(torch.stack([loss.double(), first, predictions, second]))

    def add_sums(self, sums: Tensor) -> None:
        """Add the totals of other sums, [4]."""
        self.both += sums[:, None]

    def take(self) -> Tensor:
        """Return and reset the sums since the last call, [4].

        A difference of totals would be NaN after one infinite loss.
        """
        recent_sums = self.recent.clone()
        self.recent.zero_()
        return recent_sums

    def local(self) -> Score:
        """Return the score of this rank's samples."""
        return score_of(self.totals.tolist(), self.task)

    def over_ranks(self, ctx: RankContext) -> Score:
        """Return the score over all ranks; a collective, equal on all ranks."""
        return score_of(self.sum_over_ranks(ctx).tolist(), self.task)

    def sum_over_ranks(self, ctx: RankContext) -> Tensor:
        """Return the sums over all ranks, [4]; a collective. Ranks with the same samples count once."""
        return ctx.sum_over_ranks(self.totals.clone() if ctx.mesh.counts else torch.zeros_like(self.totals))


def score_of(sums: Sequence[float], task: Task = CLASSIFICATION) -> Score:
    """Compute a score from totals."""
    loss, first, predictions, second = sums
    if predictions == 0:
        return Score(float("nan"), float("nan"), 0, task=task)
    top5 = None if math.isnan(second) else second / predictions
    return Score(loss / predictions, first / predictions, int(predictions), top5, task)


def evaluate(method: Method, batches: Batches, ctx: RankContext, task: Task = CLASSIFICATION) -> Score:
    """Score the model on the test set; a collective.

    Under plain DDP every rank scores its share with its own BatchNorm statistics.
    """
    method.module.eval()
    metric_sums, total = MetricSums(ctx.device, task), MetricSums(ctx.device, task)

    def measure(outputs: Tensor, targets: Tensor) -> None:
        metric_sums.add(task.loss(outputs, targets), outputs, targets)

    with torch.no_grad():  # not inference_mode, because FSDP keeps gathered tensors
        for x, y in batches:
            method.evaluate(x.to(ctx.device), y.to(ctx.device), measure)
    method.module.train()
    total.add_sums(method.share_sums(metric_sums.totals))
    return total.over_ranks(ctx)


@dataclass
class Best:
    """The epoch with the best first metric on the test set so far; among equal epochs the first.

    value: of the metric. epoch: counted from 1. step: optimizer steps done. None before the first evaluation.
    """

    value: float | None = None
    epoch: int | None = None
    step: int | None = None

    def update(self, test: Score, epoch: int, step: int) -> bool:
        """Record one evaluation and return whether it is the best so far; equal on all ranks.

        A run resumed at the end of an epoch may evaluate the best epoch again, which remains the best.
        """
        if step != self.step and not test.is_better(self.value):
            return False
        self.value, self.epoch, self.step = test.main[1], epoch, step
        return True
