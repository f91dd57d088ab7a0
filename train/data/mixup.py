"""Mixup: add a second sample to each training sample, image and label."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train.seeds import draw_integers, mixed, mixed_each

# Stream of random numbers; `augment` uses streams 0 and 1.
MIXUP_STREAM = 2
MIXUP_ALPHA, SMOOTHING = 0.2, 0.1


class Mixup:
    """Mix each training image and its label with another sample, and smooth the labels.

    A sample has the weight w of Beta(0.2, 0.2), its partner 1 - w (https://arxiv.org/abs/1710.09412). Both draws depend
    only on the seed, the epoch and the index of the sample. timm and torchvision instead mix the samples of a batch
    with one weight, so that the result depends on the number of ranks. Label smoothing
    (https://arxiv.org/abs/1512.00567) spreads a tenth of the probability over all classes.
    """

    def __init__(self, seed: int, classes: int) -> None:
        self.seed, self.classes = seed, classes

    def draw(self, indices: Tensor, epoch: int, samples: int) -> tuple[Tensor, Tensor]:
        """Draw the partner of each sample, int64 [N] below `samples`, and its own weight, float32 [N]."""
        keys = mixed_each(mixed(self.seed, epoch, MIXUP_STREAM), indices.numpy())
        weights = [np.random.default_rng(int(key)).beta(MIXUP_ALPHA, MIXUP_ALPHA) for key in keys]
        return torch.from_numpy(draw_integers(keys, 0, samples)), torch.tensor(weights, dtype=torch.float32)

    def mix(self, image: Tensor, partner: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted mean of two batches of images, or of two batches of labels, int64 [N].

        Labels become probabilities, float32 [N, classes].
        """
        if not image.is_floating_point():
            image, partner = (
                F.one_hot(y, self.classes) * (1 - SMOOTHING) + SMOOTHING / self.classes for y in (image, partner)
            )
        weights = weights.view(-1, *[1] * (image.dim() - 1))
        return weights * image + (1 - weights) * partner
