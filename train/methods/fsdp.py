"""Fully Sharded Data Parallel (FSDP2): each rank keeps a shard of every parameter.

Compare with ddp.py: equal numbers mark the same steps. An all-gather collects the parameters of each block just before
they are used; they are freed afterwards. In backward a reduce-scatter averages the gradients, and each rank receives
its shard. The optimizer state is sharded in the same way.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.errors import UserError, refuse
from train.methods.single import Method
from train.methods.sync_batchnorm import convert_sync_batchnorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from train.launch import RankContext
    from train.settings import Settings

# fully_shard records events on streams. torch 2.6 lacks this method for the CPU's placeholder streams.
ON_CPU = hasattr(torch.cpu.Stream, "record_event")
# --reshard-after-forward, if it is not a number of ranks.
RESHARD = {"true": True, "false": False}


class Fsdp(Method):
    """Parameters, gradients and optimizer state are sharded over all ranks, so each element exists once.

    A comparison of ranks therefore cannot detect errors in them. All ranks must start from one seed, because nothing is
    broadcast. Every rank has all buffers, and they are never synchronized: without --sync-bn each rank's BatchNorm
    statistics drift.
    """

    grouped = True
    refuses: ClassVar[Mapping[str, str]] = {
        "--no-buffer-sync": "FSDP never synchronizes buffers; --sync-bn makes the statistics equal",
        "--find-unused": "FSDP does not wait for gradients of unused parameters",
        "--join": "FSDP has no join, and the remaining ranks need the shards of a rank without batches",
        "--channels-last": "FSDP shards only contiguous parameters",
        "--comm-hook": "DDP's hooks do not work with FSDP; MixedPrecisionPolicy(reduce_dtype) reduces in 16 bits",
        "--ema": "AveragedModel needs the whole model, and each rank has only a shard",
        "--save-format safetensors": "the format cannot record the position of a shard in its tensor; use pth",
    }
    mesh: DeviceMesh

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        device, group = ctx.device.type, settings.reshard_after_forward
        ranks = ctx.mesh.size("shard")
        self.reshard: bool | int | None = None
        if group is not None:
            self.reshard = RESHARD[group] if group in RESHARD else int(group)
        group_size = int(self.reshard or 1)
        reduces_shards = settings.grad_clip is not None or settings.amp == "fp16"
        refuse(
            (
                device == "cpu" and not ON_CPU,
                f"--method {settings.method}: torch {torch.__version__} shards on GPUs only; use 2.7 or newer on CPUs",
            ),
            (
                ranks % group_size,
                f"--reshard-after-forward {group}: must divide {ranks}, the ranks that share a copy",
            ),
            (
                reduces_shards and settings.cpu_offload and device == "cuda",
                "--cpu-offload: not with --grad-clip or --amp fp16 on GPUs: NCCL cannot reduce CPU tensors",
            ),
        )

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report unsynchronized buffers."""
        return super().metadata_fields | {"buffers_synced": self.settings.sync_bn}

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:  # noqa: ARG003 - for subclasses
        """Return a one-dimensional mesh: parameters are sharded over all ranks."""
        return {"shard": world_size}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to its device and shard it."""
        # 1a. Convert to SyncBatchNorm first, as in ddp.py.
        if self.settings.mp_policy and any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise UserError(
                "--mp-policy: not with BatchNorm: its statistics are in float32, and torch refuses weights in bfloat16 "
                "beside them; use --amp bf16, or a model without BatchNorm"
            )
        if self.settings.sync_bn:
            model = convert_sync_batchnorm(model)
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        self.mesh = self.ctx.mesh.build(self.ctx.device.type)
        self.shard(self.mesh)
        return self.module

    def shard(self, mesh: DeviceMesh) -> None:
        """Shard the model over the ranks of a mesh."""
        # 1b. Shard each block, then the rest. Parameters sharded together are gathered together: smaller groups need
        #     less memory, larger groups fewer messages. The remaining parameters stay gathered until their backward.
        #     Every parameter becomes a DTensor with this rank's rows and the global shape.
        for block in find_blocks(self.module):
            self.shard_module(block, mesh=mesh, **self.policies())
        # 1c. With --mp-policy the outputs of the whole model return to float32 before the loss.
        self.shard_module(self.module, mesh=mesh, **self.policies(output_dtype=torch.float32))

    def shard_module(self, module: nn.Module, **arguments: Any) -> None:
        """Shard the parameters of a module that are not sharded yet."""
        # Takes half a second, so only this method imports it.
        from torch.distributed.fsdp import fully_shard

        if self.reshard is not None:
            # True frees the gathered parameters after forward, and gathers them again for backward. False keeps them
            # (ZeRO stage 2): fewer messages, more memory. A number keeps a shard of this many ranks.
            arguments["reshard_after_forward"] = self.reshard
        fully_shard(module, **arguments)

    def policies(self, output_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the arguments for --mp-policy and --cpu-offload."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        policies: dict[str, Any] = {}
        if self.settings.mp_policy:
            # Parameters are gathered, and layers compute, in bfloat16. Gradients are added in float32. The shards, and
            # so the optimizer and the files, stay in float32.
            policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype)
        if self.settings.cpu_offload:
            # Shards, gradients and optimizer state are in the CPU's memory, and the optimizer steps there.
            policies["offload_policy"] = CPUOffloadPolicy(pin_memory=self.ctx.device.type == "cuda")
        return policies

    # 2. As in single.py. The optimizer is built after sharding, which replaces the model's parameters.

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep unsharded gradients on this rank until the last micro-batch: fewer messages, more memory."""
        # 3a. A setting of the module, unlike DDP's context manager.
        self.module.set_requires_gradient_sync(False)  # type: ignore[operator]  # fully_shard gave it this method
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)  # type: ignore[operator]

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; each rank receives the average for its shards."""
        # 3. As in ddp.py: the reduce-scatter averages over ranks, so multiply the loss by the number of ranks.
        (loss * self.ctx.mesh.data_size).backward()  # type: ignore[no-untyped-call]

    # 4. As in single.py. The scaler combines the overflow flags of all ranks' shards.
    # 5. As in single.py. The state dict has DTensors, so each file records which shard it contains.


def find_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """List the modules to shard separately: the members of the model's stages, such as a ResNet's blocks.

    Sharding each layer separately would cost a collective per layer.
    """
    for stage in model.children():
        if isinstance(stage, nn.Sequential):
            yield from (block for block in stage if any(True for _ in block.parameters()))
