"""ResNet-18, 34 and 50 (https://arxiv.org/abs/1512.03385) with variable width and a stem for small images.

The stem is a single 3x3 convolution with stride 1 and no pooling, because the stages already halve images of 8x8 to
32x32 three times. Tensors have the same names and order as in torchvision.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 64  # channels of the first stage in the paper


class Block(nn.Module):
    """Residual block with two 3x3 convolutions; the shortcut is a 1x1 convolution if the shape changes."""

    expansion: ClassVar[int] = 1  # output channels divided by `channels`

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _build_shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """Residual block with 1x1, 3x3 and 1x1 convolutions; the last has four times as many output channels.

    `stride` applies to the 3x3 convolution, as in torchvision; the paper applies it to the first convolution.
    """

    expansion: ClassVar[int] = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.downsample = _build_shortcut(channels_in, 4 * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, 4 * channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def _build_shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))


class ResNet(nn.Module):
    """Four stages with 1, 2, 4 and 8 times `width` channels.

    block: block class. blocks: number of blocks per stage. The first block of the second to fourth stage halves the
    image.
    """

    def __init__(
        self,
        block: type[Block | Bottleneck],
        blocks: tuple[int, ...],
        channels: int,
        classes: int,
        width: int | None,
    ) -> None:
        super().__init__()
        width = width or WIDTH
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _build_stage(block, blocks[0], width, width, 1)
        self.layer2 = _build_stage(block, blocks[1], width * block.expansion, 2 * width, 2)
        self.layer3 = _build_stage(block, blocks[2], 2 * width * block.expansion, 4 * width, 2)
        self.layer4 = _build_stage(block, blocks[3], 4 * width * block.expansion, 8 * width, 2)
        self.fc = nn.Linear(8 * width * block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer4(self.layer3(self.layer2(self.layer1(y))))
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits


def _build_stage(
    block: type[Block | Bottleneck], blocks: int, channels_in: int, channels: int, stride: int
) -> nn.Sequential:
    first = block(channels_in, channels, stride)
    return nn.Sequential(first, *(block(channels * block.expansion, channels, 1) for _ in range(blocks - 1)))
