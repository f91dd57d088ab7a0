"""Buffers of modules other than BatchNorm, updated by each rank from its own data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from train.faults.base import Fault
from train.faults.start import find_first_layer

if TYPE_CHECKING:
    from torch import Tensor

    from train.methods.single import Method


class InputNormalizer(nn.Module):
    """Normalize images by running per-channel mean and variance, like observation normalizers in RL."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.register_buffer("count", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, C, H, W]. Returns the normalized input in the same shape."""
        if self.training:
            self._update(x.detach())
        return (x - self.mean[:, None, None]) / (self.var[:, None, None] + 1e-5).sqrt()

    def _update(self, x: Tensor) -> None:
        """Merge the moments of a batch into the running moments (Chan et al., 1979)."""
        mean, var, count = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() // x.size(1)
        total, delta = self.count + count, mean - self.mean
        self.var.copy_((self.var * self.count + var * count + delta**2 * self.count * count / total) / total)
        self.mean.add_(delta * count / total)
        self.count.copy_(total)


class LocalNormalizer(Fault):
    """Normalize images by running statistics of each rank's own batches.

    The module is added after wrapping, so DDP does not broadcast its buffers:
    https://github.com/Denys88/rl_games/pull/363.
    """

    summary = "images are normalized by running statistics of each rank's own batches"
    code = "SYN205"

    def after_wrap(self, method: Method, forward: nn.Module) -> nn.Module:
        """Insert a normalizer before the first convolution on all ranks."""
        convolution = find_first_layer(method.module)
        if not isinstance(convolution, nn.Conv2d):
            self.refuse("the model does not begin with a convolution; use --model resnet8")
        normalizer = InputNormalizer(convolution.in_channels).to(self.ctx.device)
        method.module.normalizer = normalizer
        convolution.register_forward_pre_hook(lambda _, inputs: (normalizer(*inputs),))
        return forward
