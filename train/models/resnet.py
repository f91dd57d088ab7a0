"""ResNet-18, 34 and 50 (https://arxiv.org/abs/1512.03385) with a `width` knob and a stem for small images.

The stem is one 3x3 convolution of stride 1 and no pooling, so that images of 8x8 to 32x32 survive the three
halvings. Names and order of the tensors are those of torchvision's. Shapes: x is [N, channels, H, W], logits are
[N, classes].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from train.models.shape import Shape

WIDTH = 64  # channels of the first stage in the paper


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut, which is a 1x1 convolution where the shape changes."""

    expansion: ClassVar[int] = 1  # channels that leave it, by `channels`

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, the second of which makes four times as many channels.

    `stride` is that of the 3x3 convolution, as in torchvision; in the paper it is that of the first.
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
        self.downsample = _shortcut(channels_in, 4 * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, 4 * channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    if stride == 1 and channels_in == channels_out:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))


class ResNet(nn.Module):
    """Four stages with 1, 2, 4 and 8 times `width` channels.

    block: of which kind. blocks: how many in each stage; the first of the later stages halves the image.
    """

    def __init__(
        self,
        block: type[Block | Bottleneck],
        blocks: tuple[int, int, int, int],
        channels: int,
        classes: int,
        width: int,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = _stage(block, blocks[0], width, width, 1)
        self.layer2 = _stage(block, blocks[1], width * block.expansion, 2 * width, 2)
        self.layer3 = _stage(block, blocks[2], 2 * width * block.expansion, 4 * width, 2)
        self.layer4 = _stage(block, blocks[3], 4 * width * block.expansion, 8 * width, 2)
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


def _stage(block: type[Block | Bottleneck], blocks: int, channels_in: int, channels: int, stride: int) -> nn.Sequential:
    first = block(channels_in, channels, stride)
    return nn.Sequential(first, *(block(channels * block.expansion, channels, 1) for _ in range(blocks - 1)))


def resnet18(shape: Shape) -> nn.Module:
    """Build it; 11.2 million parameters at width 64."""
    return ResNet(Block, (2, 2, 2, 2), shape.channels, shape.classes, shape.width or WIDTH)


def resnet34(shape: Shape) -> nn.Module:
    """Build it; 21.3 million parameters at width 64."""
    return ResNet(Block, (3, 4, 6, 3), shape.channels, shape.classes, shape.width or WIDTH)


def resnet50(shape: Shape) -> nn.Module:
    """Build it; 23.5 million parameters at width 64."""
    return ResNet(Bottleneck, (3, 4, 6, 3), shape.channels, shape.classes, shape.width or WIDTH)
