"""DataParallel: one process, several devices, a temporary replica on each during forward and backward.

Compare with single.py: equal numbers mark the same steps, letters mark additions. With several GPUs this is
torch.nn.DataParallel; otherwise the replicas are threads on one device, see train/methods/replica_threads.py. PyTorch
recommends DDP instead, even on one machine: here one Python interpreter drives all GPUs, and every forward copies the
model.
https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from train.errors import UserError
from train.methods.base import Replica
from train.methods.replica_threads import GpuReplicas, ReplicaBuffers, ThreadReplicas
from train.methods.single import Method

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

REPLICAS = 2  # default with fewer than two GPUs


class Dp(Method):
    """One set of parameters, one optimizer, and one replica per device.

    Parameters and optimizer state therefore cannot differ. BatchNorm's running statistics can, as under DDP: each
    replica updates its own from its share of the batch, and the next forward copies all replicas from the first. If the
    batch is too small for all replicas, the last ones are idle and keep their buffers from before the step.
    """

    grouped = False
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "replicas are threads of one process, and SyncBatchNorm needs one process per replica",
        "--no-buffer-sync": "every forward copies the first replica's buffers to all replicas",
        "--join": "a single process never waits for another rank",
        "--compile": "every forward creates new replicas, which would have to be compiled again",
        "--comm-hook": "autograd adds the gradients of the replicas, without a hook",
        "--find-unused": "autograd adds the gradients of the replicas and ignores unused parameters",
    }

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        several = len(ctx.devices) > 1
        self.replicas = settings.replicas or (len(ctx.devices) if several else REPLICAS)
        if several and self.replicas > len(ctx.devices):
            raise UserError(f"--replicas {self.replicas}: must be at most {len(ctx.devices)}, the number of GPUs")
        self.devices = ctx.devices[: self.replicas] if several else (ctx.device,)
        self.buffers = ReplicaBuffers(self.replicas)

    # Buffers are reported as synchronized. The next forward synchronizes them, so a checkpoint lags by one step.

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to the first device and wrap it."""
        # 1. Move the parameters and buffers to the first device, which updates them and accumulates all gradients.
        self.module = model.to(self.devices[0])
        # 1a. Wrap. Every forward splits the batch, copies the model to each device, runs all copies, and
        #     gathers their outputs.
        if len(self.devices) > 1:
            return GpuReplicas(self.module, self.devices, self.buffers)
        return ThreadReplicas(self.module, self.buffers)

    # 2. As in single.py: replicas have no parameters of their own.
    # 3. As in single.py: the loss covers the whole batch, because its outputs have been gathered.
    # 4. As in single.py: the next forward copies the updated parameters to the replicas.

    def list_replicas(self, optimizer: Optimizer) -> list[Replica]:
        """Return the contents of each replica: the common parameters and its own buffers."""
        # 5. torch discards all replicas but the first, so their buffers are recorded at each training forward.
        return [Replica(state, optimizer) for state in self.buffers.states(self.module)]

    def extra_state(self) -> dict[str, Any]:
        """Return the replicas' buffers, needed if the run ends before another forward."""
        return {"buffers": self.buffers.last}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore the buffers for the current number of replicas; the next training forward replaces them."""
        last = state["buffers"]
        self.buffers.last = [last[index % len(last)] for index in range(self.replicas)]
