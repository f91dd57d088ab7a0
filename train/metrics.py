"""Loss, accuracy and speed, exact over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from train.launch import RankContext


@dataclass(frozen=True)
class Score:
    """How well a model did.

    loss: mean cross-entropy per sample, in nats. accuracy: share of right answers, 0 to 1. samples: how many.
    """

    loss: float
    accuracy: float
    samples: int


class Meter:
    """Adds up sums, never means: ranks and batches of different size then weigh what they should.

    The sums stay on the device, so that adding does not wait for it, and in float64, where counts are exact.
    sums: [3] loss, right answers, samples. recent: [3] the same since the last `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self.both = torch.zeros(3, 2, dtype=torch.float64, device=device)
        self.sums, self.recent = self.both.unbind(1)  # views

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Count one batch. loss_sum: [] the sum over its samples. logits: [N, classes]. labels: [N] int64."""
        right = (logits.detach().argmax(1) == labels).sum()
        self.both[0] += loss_sum.detach()
        self.both[1] += right
        self.both[2] += len(labels)

    def take(self) -> Tensor:
        """Give the sums since the last call, [3]: not as a difference of sums, which one infinite loss would spoil."""
        taken = self.recent.clone()
        self.recent.zero_()
        return taken

    def local(self) -> Score:
        """Score what this rank has seen."""
        return score_of(self.sums.tolist())

    def over_ranks(self, ctx: RankContext) -> Score:
        """Score what all ranks have seen; a collective, equal on all ranks."""
        return score_of(ctx.sum_over_ranks(self.sums.clone()).tolist())


def score_of(sums: Sequence[float]) -> Score:
    """Make a score of the sums of loss, right answers and samples."""
    loss, right, samples = sums
    if samples == 0:
        return Score(float("nan"), float("nan"), 0)
    return Score(loss / samples, right / samples, int(samples))
