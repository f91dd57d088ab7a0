"""Loss and accuracy, exact over all ranks: of an epoch of training, and on the test set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from train.launch import RankContext
    from train.loading import Batches
    from train.methods.single import Method


TOP = 5  # of Score.top5
SUMS = 4  # of a Meter


@dataclass(frozen=True)
class Score:
    """The performance of a model.

    loss: mean cross-entropy per sample, in nats. accuracy: fraction of correct predictions. samples: number of samples.
    top5: fraction of samples whose class is among the five most probable classes; None with at most five classes.
    """

    loss: float
    accuracy: float
    samples: int
    top5: float | None = None


class Meter:
    """Accumulates sums rather than means, so that ranks and batches of different sizes are weighted correctly.

    The sums stay on the device, so adding does not wait for it. They are float64, which represents counts exactly.
    sums: [4] loss, correct predictions, samples, and samples for Score.top5, NaN with at most five classes. recent: [4]
    the same since the last `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self.both = torch.zeros(SUMS, 2, dtype=torch.float64, device=device)
        self.sums, self.recent = self.both.unbind(1)  # views

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add one batch. loss_sum: [] sum over the predictions. logits: [..., classes]. labels: as in cross_entropy."""
        labels = most_probable(labels)
        # With --loss-parallel they are DTensors.
        tensors = loss_sum.detach(), logits.detach()
        loss_sum, logits = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors)
        right = (logits.argmax(-1) == labels).sum()
        top5 = (logits.topk(TOP).indices == labels[..., None]).sum() if logits.shape[-1] > TOP else right * math.nan
        self.add_sums(torch.stack([loss_sum.double(), right, right.new_tensor(labels.numel()), top5]))

    def add_sums(self, sums: Tensor) -> None:
        """Add the sums of another meter, [4]."""
        self.both += sums[:, None]

    def take(self) -> Tensor:
        """Return and reset the sums since the last call, [4].

        A difference of totals would be NaN after one infinite loss.
        """
        taken = self.recent.clone()
        self.recent.zero_()
        return taken

    def local(self) -> Score:
        """Return the score of this rank's samples."""
        return score_of(self.sums.tolist())

    def over_ranks(self, ctx: RankContext) -> Score:
        """Return the score over all ranks; a collective, equal on all ranks."""
        return score_of(self.sum_over_ranks(ctx).tolist())

    def sum_over_ranks(self, ctx: RankContext) -> Tensor:
        """Return the sums over all ranks, [4]; a collective. Ranks with the same samples count once."""
        return ctx.sum_over_ranks(self.sums.clone() if ctx.mesh.counts else torch.zeros_like(self.sums))


def score_of(sums: Sequence[float]) -> Score:
    """Compute a score from the sums of a meter."""
    loss, right, samples, top5 = sums
    if samples == 0:
        return Score(float("nan"), float("nan"), 0)
    return Score(loss / samples, right / samples, int(samples), None if math.isnan(top5) else top5 / samples)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over the predictions.

    logits: [..., classes]. targets: int64 [...] classes, or float [..., classes] probabilities, as after mixup.
    """
    classes = targets.flatten(0, -2) if targets.is_floating_point() else targets.flatten()
    return F.cross_entropy(logits.flatten(0, -2), classes, reduction="sum")


def most_probable(targets: Tensor) -> Tensor:
    """Return the most probable class of each target of `cross_entropy`, int64 [...]."""
    return targets.argmax(-1) if targets.is_floating_point() else targets


def evaluate(method: Method, batches: Batches, ctx: RankContext) -> Score:
    """Score the model on the test set; a collective.

    Under plain DDP every rank scores its share with its own BatchNorm statistics.
    """
    method.module.eval()
    meter = Meter(ctx.device)

    def measure(outputs: Tensor, targets: Tensor) -> None:
        meter.add(cross_entropy(outputs, targets), outputs, targets)

    with torch.no_grad():  # not inference_mode, because FSDP keeps gathered tensors
        for x, y in batches:
            method.evaluate(x.to(ctx.device), y.to(ctx.device), measure)
    method.module.train()
    total = Meter(ctx.device)
    total.add_sums(method.share_sums(meter.sums))
    return total.over_ranks(ctx)


@dataclass
class Best:
    """The epoch with the best test accuracy so far; among equal epochs the first.

    accuracy: 0 to 1. epoch: counted from 1. step: optimizer steps done. None before the first evaluation.
    """

    accuracy: float | None = None
    epoch: int | None = None
    step: int | None = None

    def update(self, test: Score, epoch: int, step: int) -> bool:
        """Record one evaluation and return whether it is the best so far; equal on all ranks.

        A run resumed at the end of an epoch may evaluate the best epoch again, which remains the best.
        """
        if self.accuracy is not None and step != self.step and not test.accuracy > self.accuracy:
            return False
        self.accuracy, self.epoch, self.step = test.accuracy, epoch, step
        return True

    def state(self) -> dict[str, Any]:
        """Return JSON values for `restore`."""
        return dict(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`."""
        vars(self).update(state)
