"""A small Vision Transformer (https://arxiv.org/abs/2010.11929) with LayerNorm, so nothing in it sees other samples.

What BatchNorm makes of a replica depends on the samples of its rank; LayerNorm has no statistics to keep, and replicas
of this network stay equal under plain DDP. Unlike the paper's it averages over the patches and has no class token, and
no dropout. Shapes: x is [N, channels, H, W] with the H and W that it was built for, logits are [N, classes].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError

if TYPE_CHECKING:
    from train.models.shape import Shape

WIDTH, DEPTH, HEADS = 64, 4, 4
MOST_PATCHES = 64  # attention takes their square in time
MOST_DEPTH = 2_000  # far above any


class Block(nn.Module):
    """Attention, then two linear layers on each patch, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, patches, width]. Returns the same shape."""
        x = x + self.attention(self.norm1(x))
        y: Tensor = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return x + y

    def attention(self, x: Tensor) -> Tensor:
        """Let every patch look at all: [N, patches, width] of the same."""
        samples, patches, width = x.shape
        # [3, N, heads, patches, width / heads]
        q, k, v = self.qkv(x).view(samples, patches, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, patches, width)
        mixed: Tensor = self.proj(y)
        return mixed


class Transformer(nn.Module):
    """Square patches, each made a vector, with a learned vector added for its place; blocks; a linear classifier."""

    def __init__(self, channels: int, classes: int, image_size: int, width: int, depth: int) -> None:
        super().__init__()
        self.image_size, patch = image_size, patch_size(image_size)
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image_size // patch) ** 2, width))
        self.layers = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, channels, H, W]. Returns logits [N, classes]."""
        y = self.embed(x).flatten(2).transpose(1, 2) + self.positions  # [N, patches, width]
        y = self.norm(self.layers(y))
        logits: Tensor = self.fc(y.mean(1))
        return logits


def patch_size(image_size: int) -> int:
    """Choose the smallest patches, 2x2 at least, of which up to 64 fill the image: 2 for 8x8, 4 for 28x28 and 32x32."""
    sizes = range(2, image_size + 1)
    fitting = (size for size in sizes if image_size % size == 0 and (image_size // size) ** 2 <= MOST_PATCHES)
    return next(fitting, image_size)


def transformer(shape: Shape) -> nn.Module:
    """Build it. depth: blocks. Raises UserError for a width that its heads cannot share."""
    width, depth = shape.width or WIDTH, shape.depth or DEPTH
    if width % HEADS:
        raise UserError(f"--width {width}: --model transformer has {HEADS} heads and needs a multiple of {HEADS}")
    if depth > MOST_DEPTH:
        raise UserError(f"--depth {depth}: needs {MOST_DEPTH} or less")
    return Transformer(shape.channels, shape.classes, shape.image_size, width, depth)
