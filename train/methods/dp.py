"""DataParallel: one process, several devices, a replica on each for the time of a forward and a backward.

Compare with single.py: the numbers are the same steps, the letters are what is added. On several GPUs this is
torch.nn.DataParallel; elsewhere its replicas are threads on one device, see train/data_parallel.py. For training
torch recommends ddp.py instead, on one machine too: here one Python interpreter drives all GPUs, and copies the model
at every forward.
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from train.data_parallel import Buffers, GpuReplicas, ThreadReplicas
from train.errors import UserError
from train.methods.base import MethodDefaults, Replica

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

REPLICAS = 2  # where there are not two GPUs that could say how many


class Dp(MethodDefaults):
    """One set of parameters, one optimizer, and as many replicas as there are devices.

    So parameters and optimizer cannot differ. BatchNorm's running statistics do, as under DDP: each replica
    updates its own with its share of the batch, and the next forward makes all replicas anew from the first. A
    batch too small for all replicas leaves the last ones idle, with the buffers from before the step.
    """

    grouped: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "its replicas are threads of one process, and SyncBatchNorm needs a process each",
        "--no-buffer-sync": "each forward makes the replicas anew, with the buffers of the first",
        "--join": "it is one process, with one set of batches",
        "--compile": "each forward makes the replicas anew, and each would be compiled anew",
        "--comm-hook": "it adds gradients up within backward, and has no place for a hook",
        "--find-unused": "it reduces gradients within backward, which waits for none",
    }

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        self.settings, self.ctx = settings, ctx
        self.module: nn.Module
        several = len(ctx.devices) > 1
        self.replicas = settings.replicas or (len(ctx.devices) if several else REPLICAS)
        if several and self.replicas > len(ctx.devices):
            raise UserError(f"--replicas {self.replicas}: one for each GPU, and there are {len(ctx.devices)}")
        self.devices = ctx.devices[: self.replicas] if several else (ctx.device,)
        self.buffers = Buffers(self.replicas)

    @property
    def facts(self) -> dict[str, Any]:
        """The next forward makes buffers equal: one step late for a file saved before it."""
        return {"buffers_synced": True}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model where the first replica computes."""
        # 1. Move the parameters and buffers to the first device: there the optimizer updates them, and there the
        #    gradients of all replicas add up.
        self.module = model.to(self.devices[0])
        # 1a. Wrap. Every forward splits its batch over the devices, copies the model to each, runs all copies at
        #     once and collects their outputs.
        if len(self.devices) > 1:
            return GpuReplicas(self.module, self.devices, self.buffers)
        return ThreadReplicas(self.module, self.buffers)

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the only optimizer."""
        # 2. As in single.py: the replicas have no parameters of their own to be trained.
        return kind(self.module.parameters(), **arguments)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing: every backward adds to the one set of gradients."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        # 3. As in single.py: the loss is that of the whole batch, for its logits have been collected.
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update the parameters; the replicas hear of it at the next forward."""
        # 4. As in single.py.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Give what each replica would have to save: the parameters of all, and its own buffers."""
        # 5. torch drops all replicas but the first, so their buffers were kept at the last training forward.
        return [Replica(state, optimizer) for state in self.buffers.states(self.module)]

    def extra_state(self) -> dict[str, Any]:
        """Give the replicas' own buffers, should the run end here and be saved again."""
        return {"buffers": self.buffers.last}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take the buffers of as many replicas as there are; the next training forward makes them anew anyway."""
        last = state["buffers"]
        self.buffers.last = [last[index % len(last)] for index in range(self.replicas)]
