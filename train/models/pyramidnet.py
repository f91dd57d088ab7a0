"""The PyramidNets for CIFAR (https://arxiv.org/abs/1610.02915): every block has a few more channels than the last.

Additive: over all blocks together `alpha` channels are added, the same number in each. A block is
BN-conv-BN-ReLU-conv-BN, and the shortcut has no parameters: it fills the new channels with zeros. Names of the tensors
are those of the authors' code, https://github.com/dyhan0920/PyramidNet-PyTorch.

Where the channels of a block come out as a fraction they are rounded down, as the paper's equation says; the authors'
code rounds to the nearest, which takes the numbers of parameters further from the paper's. Ours are within 1 % of the
paper's, and all but those of alpha 270 have its digits.

Shapes: x is [N, channels, H, W], logits are [N, classes].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError

if TYPE_CHECKING:
    from train.models.shape import Shape

WIDTH = 16  # channels of the first convolution in the paper
DEPTH, ALPHA = 110, 48  # the smallest in the paper
BOTTLENECK_DEPTH, BOTTLENECK_ALPHA = 164, 270
MOST_DEPTH, MOST_ALPHA = 2_000, 10_000  # far above any


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion: ClassVar[int] = 1  # channels that leave it, by `channels`
    layers: ClassVar[int] = 2

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
        return _joined(self.bn3(y), x, self.stride)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, the second of which makes four times as many channels."""

    expansion: ClassVar[int] = 4
    layers: ClassVar[int] = 3

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
        return _joined(self.bn4(y), x, self.stride)


def _joined(y: Tensor, x: Tensor, stride: int) -> Tensor:
    """Add the shortcut: the average of each 2x2 pixels where the image is halved, zeros for the new channels."""
    shortcut = F.avg_pool2d(x, 2, ceil_mode=True) if stride == 2 else x
    return y + F.pad(shortcut, (0, 0, 0, 0, 0, y.shape[1] - x.shape[1]))


class PyramidNet(nn.Module):
    """A first convolution, three stages of equally many blocks, the average over the image, and a classifier."""

    def __init__(
        self, block: type[Block | Bottleneck], blocks: int, alpha: int, channels: int, classes: int, width: int
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        # Of each block: the channels before its expansion.
        added = alpha / (3 * blocks)
        growing = [math.floor(width + added * number) for number in range(1, 3 * blocks + 1)]
        entering = [width, *(block.expansion * number for number in growing)]
        built = [block(entering[i], growing[i], 2 if i in (blocks, 2 * blocks) else 1) for i in range(3 * blocks)]
        self.layer1 = nn.Sequential(*built[:blocks])
        self.layer2 = nn.Sequential(*built[blocks : 2 * blocks])
        self.layer3 = nn.Sequential(*built[2 * blocks :])
        self.bn_final = nn.BatchNorm2d(entering[-1])
        self.fc = nn.Linear(entering[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = self.bn1(self.conv1(x))
        y = self.layer3(self.layer2(self.layer1(y)))
        y = F.relu(self.bn_final(y))
        logits: Tensor = self.fc(y.mean((2, 3)))
        return logits


def pyramidnet(shape: Shape) -> nn.Module:
    """Build one of depth 6n+2. Raises UserError for another depth."""
    return _build("pyramidnet", Block, shape, DEPTH, ALPHA)


def pyramidnet_bottleneck(shape: Shape) -> nn.Module:
    """Build one of depth 9n+2 with bottlenecks. Raises UserError for another depth."""
    return _build("pyramidnet_bottleneck", Bottleneck, shape, BOTTLENECK_DEPTH, BOTTLENECK_ALPHA)


def _build(name: str, block: type[Block | Bottleneck], shape: Shape, depth: int, alpha: int) -> nn.Module:
    depth, alpha = shape.depth or depth, shape.alpha or alpha
    step = 3 * block.layers
    blocks, rest = divmod(depth - 2, step)
    if rest or not 0 < depth <= MOST_DEPTH or blocks < 1:
        known = f"{step + 2}, {2 * step + 2}, {3 * step + 2}, ... ({step}n+2), up to {MOST_DEPTH}"
        raise UserError(f"--depth {depth}: --model {name} needs {known}")
    if alpha > MOST_ALPHA:
        raise UserError(f"--alpha {alpha}: needs {MOST_ALPHA} or less")
    return PyramidNet(block, blocks, alpha, shape.channels, shape.classes, shape.width or WIDTH)
