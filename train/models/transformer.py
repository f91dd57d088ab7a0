"""A small Vision Transformer (https://arxiv.org/abs/2010.11929), whose replicas stay equal under plain DDP.

It has LayerNorm, which tracks no statistics, so samples do not affect each other. Unlike the paper's model, it averages
over the patches instead of using a class token, and has no dropout. The image size is fixed when the model is built.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.errors import UserError

WIDTH, DEPTH, HEADS = 64, 4, 4
MAX_PATCHES = 64  # attention takes quadratic time
MAX_DEPTH = 2_000  # far above useful sizes


class Block(nn.Module):
    """Pre-norm transformer block: self-attention and an MLP, each with a LayerNorm and a residual connection."""

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
        """Apply multi-head self-attention: [N, patches, width] to the same shape."""
        samples, patches, width = x.shape
        # [3, N, heads, patches, width / heads]
        q, k, v = self.qkv(x).view(samples, patches, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, patches, width)
        projected: Tensor = self.proj(y)
        return projected


class Transformer(nn.Module):
    """Patch embedding with learned positions, `depth` blocks, average over the patches, and a linear classifier.

    Raises UserError if the width is not a multiple of the number of heads.
    """

    def __init__(self, channels: int, classes: int, image_size: int, width: int | None, depth: int | None) -> None:
        super().__init__()
        width, depth = width or WIDTH, depth or DEPTH
        if width % HEADS:
            raise UserError(f"--width {width}: for --model transformer, must be a multiple of its {HEADS} heads")
        if depth > MAX_DEPTH:
            raise UserError(f"--depth {depth}: must be at most {MAX_DEPTH}")
        self.image_size, patch = image_size, choose_patch_size(image_size)
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


def choose_patch_size(image_size: int) -> int:
    """Return the smallest size from 2 that tiles the image with at most 64 patches: 2 for 8x8, 4 for 28x28 and 32x32.

    If no valid size exists, the image is a single patch.
    """
    sizes = range(2, image_size + 1)
    valid = (size for size in sizes if image_size % size == 0 and (image_size // size) ** 2 <= MAX_PATCHES)
    return next(valid, image_size)
