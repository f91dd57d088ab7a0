"""Loss and accuracy, exact over all ranks."""

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
    """The performance of a model.

    loss: mean cross-entropy per sample, in nats. accuracy: fraction of correct predictions. samples: number of samples.
    """

    loss: float
    accuracy: float
    samples: int


class Meter:
    """Accumulates sums rather than means, so that ranks and batches of different sizes are weighted correctly.

    The sums stay on the device, so adding does not wait for it. They are float64, which represents counts exactly.
    sums: [3] loss, correct predictions, samples. recent: [3] the same since the last `take`.
    """

    def __init__(self, device: torch.device) -> None:
        self.both = torch.zeros(3, 2, dtype=torch.float64, device=device)
        self.sums, self.recent = self.both.unbind(1)  # views

    def add(self, loss_sum: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add one batch. loss_sum: [] sum over the samples. logits: [N, classes]. labels: [N] int64."""
        right = (logits.detach().argmax(1) == labels).sum()
        self.both[0] += loss_sum.detach()
        self.both[1] += right
        self.both[2] += len(labels)

    def take(self) -> Tensor:
        """Return and reset the sums since the last call, [3].

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
        return score_of(ctx.sum_over_ranks(self.sums.clone()).tolist())


def score_of(sums: Sequence[float]) -> Score:
    """Compute a score from the sums of loss, correct predictions and samples."""
    loss, right, samples = sums
    if samples == 0:
        return Score(float("nan"), float("nan"), 0)
    return Score(loss / samples, right / samples, int(samples))
