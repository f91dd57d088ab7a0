"""Small networks without BatchNorm."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError

WIDTH, MNIST_WIDTH = 16, 32


class ConvNet(nn.Module):
    """Three convolutions, the last two with stride 2, global average pooling, and a linear classifier.

    Its gradient does not depend on how a batch is partitioned. With BatchNorm, each rank normalizes with its own
    samples, so `ddp` and `single` differ as expected; tests use this model to check that only BatchNorm differs.
    """

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


class MnistConvNet(nn.Module):
    """The network of PyTorch's MNIST example (https://github.com/pytorch/examples/blob/main/mnist/main.py).

    It supports images of at least 6x6; with 28x28 it has the example's 1.2 million parameters. Tensors have the names
    of the example. The example returns log-probabilities, this model logits, because the trainer's loss applies
    log_softmax.
    """

    def __init__(self, channels: int, classes: int, image_size: int, width: int | None) -> None:
        super().__init__()
        width = width or MNIST_WIDTH
        # Each convolution removes one pixel at each edge.
        pooled = (image_size - 4) // 2
        if pooled < 1:
            raise UserError(
                f"--model mnist_convnet: images of {image_size}x{image_size} are too small; use at least 6x6"
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
