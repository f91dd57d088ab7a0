"""The PyramidNets for CIFAR (https://arxiv.org/abs/1610.02915), which add a few channels in every block.

They are the additive PyramidNets: each block adds the same number of channels, `alpha` in total. A block is
BN-conv-BN-ReLU-conv-BN, and its shortcut pads new channels with zeros. Tensors have the names of the authors' code,
https://github.com/dyhan0920/PyramidNet-PyTorch.

Fractional numbers of channels are rounded down, as in the paper's equation. The authors' code rounds to the nearest
integer, and its numbers of parameters are further from the paper. Here they are within 1 % of the paper for alpha 270,
and equal to the published numbers otherwise.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import refuse
from train.models.resnet import init_convolutions

# Channels of the first convolution in the paper.
WIDTH = 16
MAX_DEPTH, MAX_ALPHA = 2_000, 10_000  # far above useful sizes


class Block(nn.Module):
    """Residual block with two 3x3 convolutions."""

    name: ClassVar[str] = "pyramidnet"  # of the network
    # Output channels divided by `channels`.
    expansion: ClassVar[int] = 1
    layers: ClassVar[int] = 2
    depth, alpha = 110, 48  # the smallest network in the paper

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, channels, H / stride, W / stride], rounded up."""
        y = self.conv1(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(y)))
        return _add_shortcut(self.bn3(y), x, self.stride)


class Bottleneck(nn.Module):
    """Residual block with 1x1, 3x3 and 1x1 convolutions; the last has four times as many output channels."""

    name: ClassVar[str] = "pyramidnet_bottleneck"
    expansion: ClassVar[int] = 4
    layers: ClassVar[int] = 3
    depth, alpha = 164, 270

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.bn4 = nn.BatchNorm2d(4 * channels)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels_in, H, W]. Returns [N, 4 * channels, H / stride, W / stride], rounded up."""
        y = self.conv1(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(y)))
        y = self.conv3(F.relu(self.bn3(y)))
        return _add_shortcut(self.bn4(y), x, self.stride)


def _add_shortcut(y: Tensor, x: Tensor, stride: int) -> Tensor:
    """Add the block's input, 2x2 average-pooled for stride 2 and padded with zeros to the channels of `y`."""
    shortcut = F.avg_pool2d(x, 2, ceil_mode=True) if stride == 2 else x
    return y + F.pad(shortcut, (0, 0, 0, 0, 0, y.shape[1] - x.shape[1]))


class PyramidNet(nn.Module):
    """A convolution, three stages of blocks, global average pooling, and a linear classifier.

    depth: 6n+2, or 9n+2 with bottlenecks. Raises UserError for other depths.
    """

    def __init__(
        self,
        block: type[Block | Bottleneck],
        channels: int,
        classes: int,
        width: int | None = None,
        depth: int | None = None,
        alpha: int | None = None,
    ) -> None:
        super().__init__()
        width, depth, alpha = width or WIDTH, depth or block.depth, alpha or block.alpha
        step = 3 * block.layers
        blocks, remainder = divmod(depth - 2, step)
        depths = f"{step + 2}, {2 * step + 2}, {3 * step + 2}, ... ({step}n+2), at most {MAX_DEPTH}"
        refuse(
            (
                remainder or blocks < 1 or depth > MAX_DEPTH,
                f"--depth {depth}: for --model {block.name}, must be {depths}",
            ),
            (alpha > MAX_ALPHA, f"--alpha {alpha}: must be at most {MAX_ALPHA}"),
        )
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        added = alpha / (3 * blocks)
        widths = [math.floor(width + added * number) for number in range(1, 3 * blocks + 1)]  # before the expansion
        inputs = [width, *(block.expansion * number for number in widths)]
        layers = [block(inputs[i], widths[i], 2 if i in (blocks, 2 * blocks) else 1) for i in range(3 * blocks)]
        self.layer1 = nn.Sequential(*layers[:blocks])
        self.layer2 = nn.Sequential(*layers[blocks : 2 * blocks])
        self.layer3 = nn.Sequential(*layers[2 * blocks :])
        self.bn_final = nn.BatchNorm2d(inputs[-1])
        self.fc = nn.Linear(inputs[-1], classes)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = self.bn1(self.conv1(x))
        y = self.layer3(self.layer2(self.layer1(y)))
        y = F.relu(self.bn_final(y))
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits
