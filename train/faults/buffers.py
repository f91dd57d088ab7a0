"""Running statistics, of BatchNorm or another module, differ by more than the lag of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from train.faults.base import Fault
from train.faults.start import find_first_layer
from train.methods.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from train.methods.single import Method


class BatchNormFault(Fault):
    """Base class of faults in BatchNorm layers."""

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Reject a model without BatchNorm."""
        if not any(isinstance(layer, _BatchNorm) for layer in method.module.modules()):
            self.refuse(f"--model {self.settings.model} has no BatchNorm layers; use --model resnet8")
        return wrapped


class BuffersNeverSynced(BatchNormFault):
    """Disable DDP's buffer synchronization without recording it.

    The metadata still reports synchronized buffers, as for a user who is unaware of the setting:
    https://github.com/facebookresearch/detectron2/issues/1297.
    """

    summary = "DDP's buffer synchronization is off, but the metadata reports it as on (add --save-every 3)"
    code = "SYN202"
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "with --sync-bn all ranks compute equal statistics in any case; remove --sync-bn",
        "--no-buffer-sync": "--no-buffer-sync has the same effect; remove either option",
    }

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Disable synchronization on all ranks; buffers start equal."""
        super().after_wrap(method, wrapped)
        assert isinstance(wrapped, DistributedDataParallel)
        # DDP reads this attribute before each forward. The second name is used before torch 2.13.
        name = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if hasattr(wrapped, name))
        setattr(wrapped, name, False)
        return wrapped


class ExtraForward(BatchNormFault):
    """Run an additional forward in training mode on the last rank before each step.

    Examples: computing a loss without eval(), a warm-up, a retried batch. The forward bypasses the wrapper, which would
    broadcast buffers and wait for the other ranks.
    """

    summary = "one rank runs an additional forward in training mode before each step"
    code = "SYN203"
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "the layers of --sync-bn would wait for the other ranks; remove --sync-bn",
    }

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Update the running statistics with this batch a second time."""
        if self.is_faulty:
            with torch.no_grad():
                method.module(x)


class LocalCount(SyncBatchNorm):
    """SyncBatchNorm that computes the unbiased variance with the local instead of the global sample count."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, C, ...]. Returns the same result as SyncBatchNorm."""
        # At least 2: a division by zero on one rank would leave the other ranks waiting.
        self.local = max(2, x.numel() // x.size(1))
        return super().forward(x)

    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:  # noqa: ARG002 - this is the fault
        super()._track(mean, var, self.local)


class VarianceOnly(BatchNormFault):
    """On the last rank, SyncBatchNorm applies n / (n - 1) with the rank's own n instead of the global n.

    torch had this bug with unequal batches: https://github.com/pytorch/pytorch/issues/22192. Training is unaffected,
    because it normalizes with the biased variance.
    """

    summary = "one rank's SyncBatchNorm uses its local count for the unbiased running variance (needs --sync-bn)"
    code = "SYN204"
    needs: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "plain BatchNorm always uses the local count; add --sync-bn",
    }

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Replace the class of the layers on one rank."""
        super().after_wrap(method, wrapped)
        for layer in method.module.modules():
            if self.is_faulty and isinstance(layer, SyncBatchNorm):
                # Keep the object, because DDP holds references to it, and change only its class.
                layer.__class__ = LocalCount
        return wrapped


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

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Insert a normalizer before the first convolution on all ranks."""
        convolution = find_first_layer(method.module)
        if not isinstance(convolution, nn.Conv2d):
            self.refuse("the model does not begin with a convolution; use --model resnet8")
        normalizer = InputNormalizer(convolution.in_channels).to(self.ctx.device)
        method.module.normalizer = normalizer
        convolution.register_forward_pre_hook(lambda _, inputs: (normalizer(*inputs),))
        return wrapped
