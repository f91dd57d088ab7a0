"""The small ResNets of depth 6n+2 for CIFAR-10 (https://arxiv.org/abs/1512.03385, section 4.2).

Three stages of n blocks have 1, 2 and 4 times `width` channels; the second and third halve the image. Shortcuts have no
parameters ("option A"): they subsample every other pixel and pad new channels with zeros. Inputs are at least 8x8.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16  # channels of the first stage in the paper, and default


class Block(nn.Module):
    """Residual block with two 3x3 convolutions; `stride` 2 halves the image when the channels double."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.new_channels = channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))
        return F.relu(y + shortcut)


class CifarResNet(nn.Module):
    """A convolution, three stages, global average pooling, and a linear classifier."""

    def __init__(self, depth: int, channels: int, classes: int, width: int | None) -> None:
        super().__init__()
        width = width or WIDTH
        blocks = (depth - 2) // 6
        if blocks < 1 or depth != 6 * blocks + 2:
            raise ValueError(f"depth {depth}: must be 8, 14, 20, ... (6n+2)")
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _build_stage(blocks, width, width, stride=1)
        self.layer2 = _build_stage(blocks, width, 2 * width, stride=2)
        self.layer3 = _build_stage(blocks, 2 * width, 4 * width, stride=2)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer3(self.layer2(self.layer1(y)))
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits


def _build_stage(blocks: int, channels_in: int, channels: int, stride: int) -> nn.Sequential:
    first = Block(channels_in, channels, stride)
    return nn.Sequential(first, *(Block(channels, channels, 1) for _ in range(blocks - 1)))
