"""DistributedDataParallel: a replica per process, gradients averaged during backward.

Compare with single.py: the numbers are the same steps, the letters are what is added. DDP collects gradients in
buckets, and sends each in an all-reduce as soon as backward has filled it, so that sending and computing overlap.
https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from train.comm_hooks import memory_of, register_hook, remember
from train.methods.base import MethodDefaults, Replica
from train.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings


class Ddp(MethodDefaults):
    """Every rank holds the whole model and its share of each global batch.

    Parameters and optimizer state stay bitwise equal on all ranks. BatchNorm's running statistics do not:
    each rank updates them with its own samples, and only the next forward replaces them by rank 0's. With
    --no-buffer-sync nothing ever does. With --sync-bn all ranks compute the same statistics in the first
    place.
    """

    grouped: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {}
    replicas = 1
    rebuilds_buckets: ClassVar[bool] = True

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings, self.ctx = settings, ctx
        self.module: nn.Module
        self.wrapper: DistributedDataParallel
        self.compressor: PowerSGDState | None = None  # with --comm-hook powersgd

    @property
    def facts(self) -> dict[str, Any]:
        """By default the next forward makes buffers equal: one step late for a file saved before it."""
        return {"buffers_synced": self.settings.sync_bn or self.settings.buffer_sync}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model where it computes, and let DDP watch its gradients."""
        # 1a. SyncBatchNorm first: DDP collects the model's parts when it is built.
        if self.settings.sync_bn:
            model = convert_sync_batchnorm(model)
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        # 1b. Wrap. This sends rank 0's parameters and buffers to all, so they start equal whatever the seeds
        #     were. On a GPU, name it; on the CPU there is nothing to name. A parameter that a step does not
        #     use leaves that step's reduction unfinished, and DDP raises, unless it is told to look for such.
        self.wrapper = DistributedDataParallel(
            self.module,
            device_ids=[self.ctx.device.index] if self.ctx.device.type == "cuda" else None,
            find_unused_parameters=self.settings.find_unused,
            **buffer_arguments(self.settings.buffer_sync),
        )
        # 1c. Train through the wrapper, or no gradient is averaged; evaluate through the module: a forward of the
        #     wrapper copies rank 0's buffers over the others, and hides that they differ.
        # 1d. What is sent of a gradient, if not all of it.
        if self.settings.comm_hook != "none":
            self.compressor = register_hook(self.wrapper, self.settings)
        return self.wrapper

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build this rank's optimizer, equal to all others'."""
        # 2. As in single.py: DDP averages gradients, and knows nothing of the optimizer.
        return kind(self.module.parameters(), **arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave the gradients of this micro-batch where they are, to be averaged with the last one's."""
        # 3a. Around the forward too: it is the forward that decides whether its backward will synchronize.
        no_sync: AbstractContextManager[None] = self.wrapper.no_sync()
        return no_sync

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, which DDP averages over the ranks on the way."""
        # 3b. DDP divides the sum by the number of ranks, but the shares in `loss` already add up to the
        #     global mean: undo the division. (With 32 samples on 2 ranks each loss is a sum of 16 divided by 32,
        #     and times 2 it is the usual mean over the rank's own 16.)
        loss = loss * self.ctx.world_size
        # 3. Every rank must call this equally often, for each waits for all the others.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters: equal values, equal gradients, so they stay equal without being sent."""
        # 4. As in single.py. The scaler sees the averaged gradients, so all ranks leave out the same steps.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    @contextmanager
    def joined(self, optimizer: Optimizer) -> Iterator[None]:
        """Let ranks run out of batches one before the other, and bring all to where the last one is."""
        # 4a. A rank that is done stays in the block until all are: there it answers the others' messages with zeros.
        #     DDP goes on dividing by all ranks, so a sample weighs as much as before. In the end it sends all ranks the
        #     parameters and buffers of one that was among the last.
        with self.wrapper.join():
            yield
        # 4b. But not its optimizer, of which DDP knows nothing: the momentum of a rank that was done earlier lacks the
        #     others' last steps, and ranks would part with the first step of the next epoch. Rank 0 is always one of
        #     the last.
        send_optimizer(optimizer, self.ctx.device)

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Give this rank's replica."""
        # 5. Of the module, not of the wrapper, which would put "module." before every name.
        return [Replica(self.module.state_dict(), optimizer)]

    def extra_state(self) -> dict[str, Any]:
        """Give what PowerSGD remembers, if that is the hook."""
        # 5a. It remembers by bucket, and a resumed run must fill its buckets alike: see `Step.rehearse`.
        return {} if self.compressor is None else memory_of(self.compressor, self.ctx)

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        if self.compressor is not None:
            remember(self.compressor, state, self.ctx)


def send_optimizer(optimizer: Optimizer, device: torch.device) -> None:
    """Replace the tensors of the optimizer's state by those of rank 0; a collective. All ranks have made a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    sent = value.to(device)  # Adam keeps its count on the CPU, which NCCL does not reach
                    dist.broadcast(sent, 0)
                    value.copy_(sent)


def buffer_arguments(sync: bool) -> dict[str, Any]:
    """Spell "leave the buffers alone" for the torch at hand; nothing where they are to be synchronized.

    forward_sync_buffers still sends them once at the start; broadcast_buffers, which it replaced in torch
    2.13, does not even do that, but here they start equal from the seed.
    """
    if sync:
        return {}
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
