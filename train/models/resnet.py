"""ResNets (https://arxiv.org/abs/1512.03385) with variable width and a stem for small images.

The stem is a single 3x3 convolution with stride 1 and no pooling, because the stages already halve images of 8x8 to
32x32 two or three times. Tensors have the same names and order as in torchvision.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn


class PaddedShortcut(nn.Module):
    """The shortcut without parameters ("option A"): subsample every other pixel, and pad new channels with zeros."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = channels_out - channels_in, stride

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, channels_out, H / stride, W / stride]."""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Projection(nn.Sequential):
    """The shortcut with a 1x1 convolution, for blocks that change the shape."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__(nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out))


class Block(nn.Module):
    """Residual block with two 3x3 convolutions."""

    # Output channels divided by `channels`.
    expansion: ClassVar[int] = 1
    # Channels of the first stage in the paper.
    width: ClassVar[int] = 64
    shortcut: ClassVar[type[Projection | PaddedShortcut]] = Projection

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = self.build_shortcut(channels_in, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x))

    def build_shortcut(self, channels_in: int, channels_out: int, stride: int) -> nn.Module:
        """Return the identity if the block keeps the shape."""
        if stride == 1 and channels_in == channels_out:
            return nn.Identity()
        return self.shortcut(channels_in, channels_out, stride)


class CifarBlock(Block):
    """The block of the small ResNets for CIFAR-10 (section 4.2), with a shortcut without parameters."""

    width, shortcut = 16, PaddedShortcut


class Bottleneck(Block):
    """Residual block with 1x1, 3x3 and 1x1 convolutions; the last has four times as many output channels.

    `stride` applies to the 3x3 convolution, as in torchvision; the paper applies it to the first convolution.
    """

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        nn.Module.__init__(self)
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * channels)
        self.downsample = self.build_shortcut(channels_in, 4 * channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, 4 * channels, H / stride, W / stride]."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def init_convolutions(model: nn.Module) -> None:
    """Draw the weights of all convolutions as in He et al. (2015), https://arxiv.org/abs/1502.01852."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class ResNet(nn.Module):
    """Stages with 1, 2, 4 and 8 times `width` channels, global average pooling, and a linear classifier.

    block: block class. blocks: number of blocks per stage. The first block of each later stage halves the image.
    """

    def __init__(
        self, block: type[Block], blocks: tuple[int, ...], channels: int, classes: int, width: int | None
    ) -> None:
        super().__init__()
        width = width or block.width
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.stages = []
        channels_in = width
        for number, count in enumerate(blocks):
            layers = []
            for index in range(count):
                layers.append(block(channels_in, width << number, 2 if number and not index else 1))
                channels_in = block.expansion * (width << number)
            self.stages.append(f"layer{number + 1}")
            self.add_module(self.stages[-1], nn.Sequential(*layers))
        self.fc = nn.Linear(channels_in, classes)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = F.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            y = self.get_submodule(stage)(y)
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits
