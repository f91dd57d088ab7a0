"""Fully Sharded Data Parallel (FSDP2): each rank keeps a part of every parameter, and all of none.

Compare with ddp.py: the numbers are the same steps. Each block's parameters are gathered from all ranks just before
they are used (an all-gather) and let go after. In backward the ranks' gradients are added up, and each rank receives
the part whose parameters it keeps (a reduce-scatter); the optimizer's state for that part is there too.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from train.errors import UserError
from train.methods.base import MethodDefaults, Replica
from train.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.amp import GradScaler
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

# fully_shard records events on streams, of which the CPU has stand-ins; in torch 2.6 they lack that one.
ON_CPU = hasattr(torch.cpu.Stream, "record_event")


class Fsdp(MethodDefaults):
    """Parameters, gradients and optimizer state are divided over all ranks: nothing of them exists twice.

    So no comparison of ranks can tell whether they are right; all ranks must start from one seed, for nothing
    is broadcast. Buffers are whole on every rank and never synchronized: without --sync-bn each rank's
    BatchNorm statistics run free.
    """

    grouped: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "--no-buffer-sync": "it never synchronizes buffers; --sync-bn makes the statistics equal",
        "--find-unused": "it waits for no gradient of a parameter that was not used",
        "--join": "it has no join, and a rank that is done would not give its part of the parameters to the others",
        "--channels-last": "it divides contiguous parameters only",
        "--comm-hook": "it takes none; its MixedPrecisionPolicy(reduce_dtype) does what fp16 and bf16 do",
        "--ema": "torch's AveragedModel copies the whole model, and no rank has it",
        "--save-format safetensors": "that format cannot say that a tensor is a part of a larger one; use pth",
    }
    replicas = 1

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        if ctx.device.type == "cpu" and not ON_CPU:
            raise UserError(
                f"--method {settings.method}: torch {torch.__version__} shards on GPUs only; 2.7 and newer do on CPUs"
            )
        self.settings, self.ctx = settings, ctx
        self.module: nn.Module
        self.mesh: DeviceMesh

    @property
    def facts(self) -> dict[str, Any]:
        """Say where in the mesh this rank stands, and that buffers are left alone."""
        names, place = self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or ()
        return {"buffers_synced": self.settings.sync_bn, "mesh": dict(zip(names, place, strict=True))}

    def make_mesh(self) -> DeviceMesh:
        """Arrange the ranks in one line, along which parameters are divided."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.ctx.device.type, (self.ctx.world_size,), mesh_dim_names=("shard",))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put the model where it computes, and divide it."""
        from torch.distributed.fsdp import fully_shard  # half a second that no other method needs to wait

        # 1a. SyncBatchNorm first, as in ddp.py.
        if self.settings.sync_bn:
            model = convert_sync_batchnorm(model)
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        # 1b. Divide block by block, then the rest: what is divided together is gathered together, so smaller
        #     parts need less memory at a time, larger ones fewer messages. The rest stays gathered until its
        #     backward. Every parameter becomes a DTensor: this rank's rows, and the shape of the whole.
        self.mesh = self.make_mesh()
        for block in blocks(self.module):
            fully_shard(block, mesh=self.mesh)
        fully_shard(self.module, mesh=self.mesh)
        return self.module

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer of this rank's parts."""
        # 2. After the division, or it would hold on to parameters that are no longer the model's.
        return kind(self.module.parameters(), **arguments)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep whole gradients on this rank until the last micro-batch: fewer messages for more memory."""
        # 3a. A switch on the module, in place of DDP's context.
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]  # fully_shard gave it this method
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)  # type: ignore[operator]

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; each rank receives the average of its parts."""
        # 3. As in ddp.py: the reduce-scatter averages over the ranks, so the shares are multiplied by their number.
        (loss * self.ctx.world_size).backward()  # type: ignore[no-untyped-call]

    def step(self, optimizer: Optimizer, scaler: GradScaler) -> None:
        """Update this rank's parts."""
        # 4. As in single.py. The scaler asks all ranks whether one of them found an overflow in its part.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Give this rank's parts, and its own buffers."""
        # 5. DTensors, which a checkpoint keeps as what they are: each file holds a part and says which.
        return [Replica(self.module.state_dict(), optimizer)]


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Find what is worth gathering on its own: the members of the model's stages, such as a ResNet's blocks.

    Not each layer, for every gathering is a message that all ranks wait for.
    """
    for stage in model.children():
        if isinstance(stage, nn.Sequential):
            yield from (block for block in stage if any(True for _ in block.parameters()))
