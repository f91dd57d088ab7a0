"""Mixup: add a second sample to each training sample, image and label."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train.seeds import draw_integers, mixed, mixed_each

# Stream of random numbers; `augment` uses streams 0 and 1.
MIXUP_STREAM = 2


class Mixup:
    """Mix each training image and its label with another sample, and smooth the labels.

    alpha: a sample has the weight w of Beta(alpha, alpha), its partner 1 - w (https://arxiv.org/abs/1710.09412); with
    0, samples are not mixed. smoothing: the share of the probability that label smoothing spreads over all classes
    (https://arxiv.org/abs/1512.00567). The draws depend only on the seed, the epoch and the index of the sample. timm
    and torchvision instead mix the samples of a batch with one weight, so that the result depends on the number of
    ranks.
    """

    def __init__(self, seed: int, classes: int, alpha: float, smoothing: float) -> None:
        self.seed, self.classes, self.alpha, self.smoothing = seed, classes, alpha, smoothing

    def draw(self, indices: Tensor, epoch: int, samples: int) -> tuple[Tensor, Tensor]:
        """Draw the partner of each sample, int64 [N] below `samples`, and its own weight, float32 [N]."""
        keys = mixed_each(mixed(self.seed, epoch, MIXUP_STREAM), indices.numpy())
        weights = [np.random.default_rng(int(key)).beta(self.alpha, self.alpha) for key in keys]
        return torch.from_numpy(draw_integers(keys, 0, samples)), torch.tensor(weights, dtype=torch.float32)

    def smooth(self, labels: Tensor) -> Tensor:
        """Return the probabilities of labels: int64 [N] to float32 [N, classes]."""
        return F.one_hot(labels, self.classes) * (1 - self.smoothing) + self.smoothing / self.classes

    def mix(self, image: Tensor, partner: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of two batches of images, or of two batches of labels, int64 [N].

        Labels become probabilities, float32 [N, classes].
        """
        if not image.is_floating_point():
            image, partner = self.smooth(image), self.smooth(partner)
        weights = weights.view(-1, *[1] * (image.dim() - 1))
        return weights * image + (1 - weights) * partner
