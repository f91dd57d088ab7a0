"""The network of PyTorch's MNIST example (https://github.com/pytorch/examples/blob/main/mnist/main.py): with dropout.

For images of any size from 6x6 on; 28x28 gives the example's 1.2 million parameters. Names of the tensors are the
example's. It returns logits, where the example takes their log_softmax, which is part of our loss. Shapes: x is
[N, channels, H, W], logits are [N, classes].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError

if TYPE_CHECKING:
    from train.models.shape import Shape

WIDTH = 32


class MnistConvNet(nn.Module):
    """Two convolutions, dropout and two linear layers, with dropout between."""

    def __init__(self, channels: int, classes: int, image_size: int, width: int) -> None:
        super().__init__()
        pooled = (image_size - 4) // 2  # each convolution takes a pixel off each edge
        if pooled < 1:
            raise UserError(
                f"--model mnist_convnet: needs images of 6x6 or more, and these are {image_size}x{image_size}"
            )
        self.image_size = image_size
        self.conv1 = nn.Conv2d(channels, width, 3)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(2 * width * pooled**2, 4 * width)
        self.fc2 = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = F.relu(self.conv1(x))
        y = F.relu(self.conv2(y))
        y = self.dropout1(F.max_pool2d(y, 2))
        y = self.dropout2(F.relu(self.fc1(y.flatten(1))))
        logits: Tensor = self.fc2(y)
        return logits


def mnist_convnet(shape: Shape) -> nn.Module:
    """Build it."""
    return MnistConvNet(shape.channels, shape.classes, shape.image_size, shape.width or WIDTH)
