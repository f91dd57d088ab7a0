"""DistributedDataParallel: a replica per process, gradients averaged during backward.

Compare with single.py: the numbers are the same steps, the letters are what is added.
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from train.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


class Ddp:
    """Every rank holds the whole model and its share of each global batch.

    Parameters and optimizer state stay bitwise equal on all ranks. BatchNorm's running statistics do not:
    each rank updates them with its own samples, and only the next forward replaces them by rank 0's. With
    --no-buffer-sync nothing ever does. With --sync-bn all ranks compute the same statistics in the first
    place.
    """

    grouped = True

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings, self.ctx = settings, ctx
        self.module: nn.Module

    @property
    def buffers_synced(self) -> bool:
        """By default the next forward makes them equal: one step late for a file saved before it."""
        return self.settings.sync_bn or self.settings.buffer_sync

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model where it computes, and let DDP watch its gradients."""
        # 1a. SyncBatchNorm first: DDP collects the model's parts when it is built.
        if self.settings.sync_bn:
            model = convert_sync_batchnorm(model)
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        # 1b. Wrap. This sends rank 0's parameters and buffers to all, so they start equal whatever the seeds
        #     were. On a GPU, name it; on the CPU there is nothing to name.
        device_ids = [self.ctx.device.index] if self.ctx.device.type == "cuda" else None
        arguments: dict[str, Any] = buffer_arguments(self.settings.buffer_sync)
        # 1c. Train through the wrapper, or no gradient is averaged; evaluate and save through the module, or
        #     the wrapper copies rank 0's buffers over the others and hides that they differ.
        return DistributedDataParallel(self.module, device_ids=device_ids, **arguments)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, which DDP averages over the ranks on the way."""
        # 2a. DDP divides the sum by the number of ranks, but the shares in `loss` already add up to the
        #     global mean: undo the division. (With even shares this equals the usual mean over the rank's own
        #     samples.)
        loss = loss * self.ctx.world_size
        # 2. Every rank must call this equally often, for each waits for all the others.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer) -> None:
        """Update the parameters: equal values, equal gradients, so they stay equal without being sent."""
        # 3. As in single.py.
        optimizer.step()
        optimizer.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Name this rank's tensors."""
        # 4. Of the module, not of the wrapper, which would put "module." before every name.
        return self.module.state_dict()


def buffer_arguments(sync: bool) -> dict[str, bool]:
    """Spell "leave the buffers alone" for the torch at hand; nothing where they are to be synchronized.

    forward_sync_buffers still sends them once at the start; broadcast_buffers, which it replaced in torch
    2.13, does not even do that, but here they start equal from the seed.
    """
    if sync:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
