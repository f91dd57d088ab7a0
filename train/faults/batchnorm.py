"""BatchNorm's running statistics, in more ways than one step's lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from train.faults.base import Fault
from train.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.methods.base import Method
    from train.settings import Settings


class BatchNormFault(Fault):
    """Base of those that need BatchNorm layers."""

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Refuse a model without them."""
        if not any(isinstance(layer, _BatchNorm) for layer in method.module.modules()):
            self.refuse(f"--model {self.settings.model} has no BatchNorm to go wrong; use --model resnet8")
        return forward


class BuffersNeverSynced(BatchNormFault):
    """Switch the wrapper's buffer synchronization off, and tell nobody.

    The metadata goes on saying that buffers are synchronized, as it does for a user who does not know:
    https://github.com/facebookresearch/detectron2/issues/1297.
    """

    says = "DDP's buffer sync is off, and nobody knows (add --save-every 3: the drift shows over early steps)"
    code = "SYN202"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.sync_bn:
            self.refuse("with --sync-bn all ranks compute equal statistics, synchronized or not; leave it out")
        if not settings.buffer_sync:
            self.refuse("--no-buffer-sync does the same, openly; leave one of the two out")

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Switch it off on all ranks; they started equal."""
        super().wrapped(method, forward)
        assert isinstance(forward, DistributedDataParallel)
        # The attribute that DDP asks before each forward: the second name is that of torch before 2.13.
        name = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if hasattr(forward, name))
        setattr(forward, name, False)
        return forward


class ExtraForward(BatchNormFault):
    """Run one more forward in training mode on the last rank before each step.

    A look at the loss without eval(), a warm-up, a retried batch. It goes through the module: the wrapper
    would broadcast, and wait for the others.
    """

    says = "one rank runs one more forward in training mode before each step"
    code = "SYN203"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if settings.sync_bn:
            self.refuse("the layers of --sync-bn communicate, and would wait for the other ranks; leave it out")

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Count a batch that the others do not."""
        if self.bad:
            with torch.no_grad():
                method.module(x)


class LocalCount(SyncBatchNorm):
    """SyncBatchNorm that takes its own samples for all there are when it makes the variance unbiased."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, C, ...]. Returns the same as SyncBatchNorm."""
        # 2 at least: a rank that divided by zero would leave the others waiting.
        self.local = max(2, x.numel() // x.size(1))
        return super().forward(x)

    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:  # noqa: ARG002 - this is the fault
        super()._track(mean, var, self.local)


class VarianceOnly(BatchNormFault):
    """Let SyncBatchNorm on the last rank use n / (n - 1) with its own n, not that of all ranks.

    As torch's did with unequal batches: https://github.com/pytorch/pytorch/issues/22192. Training does not
    notice, for it normalizes with the biased variance.
    """

    says = "one rank's SyncBatchNorm makes its running variance unbiased with its own count (needs --sync-bn)"
    code = "SYN204"

    def __init__(self, settings: Settings, ctx: RankContext, steps: int) -> None:
        super().__init__(settings, ctx, steps)
        if not settings.sync_bn:
            self.refuse("plain BatchNorm knows no count but its own; add --sync-bn")

    def wrapped(self, method: Method, forward: nn.Module) -> nn.Module:
        """Change the layers of one rank."""
        super().wrapped(method, forward)
        for layer in method.module.modules():
            if self.bad and isinstance(layer, SyncBatchNorm):
                # The object stays, for DDP holds it; only what it does changes.
                layer.__class__ = LocalCount
        return forward
