"""A small network without BatchNorm, whose gradient does not depend on how a batch is partitioned.

With BatchNorm, each rank normalizes with its own samples, so `ddp` and `single` differ as expected. Tests use this
model to check that BatchNorm is the only difference.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class ConvNet(nn.Module):
    """Three convolutions, the last two with stride 2, global average pooling, and a linear classifier."""

    def __init__(self, channels: int, classes: int, width: int | None) -> None:
        super().__init__()
        width = width or WIDTH
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = F.relu(self.conv1(x))
        y = F.relu(self.conv2(y))
        y = F.relu(self.conv3(y))
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits
