"""Tensor parallelism: all ranks train on the same samples, and each computes with a shard of the large matrices.

Compare with single.py: equal numbers mark the same steps, letters mark additions. The first matrix of a pair is sharded
by columns (attention heads, hidden units) and the second by rows, so one all-reduce ends each half of a block
(https://arxiv.org/abs/1909.08053). Norms are replicated. With --sequence-parallel they process a shard of the tokens,
and an all-gather and a reduce-scatter replace the all-reduce (https://arxiv.org/abs/2205.05198).
https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from train.errors import UserError
from train.mesh import find_parallel_degree
from train.methods.single import Method
from train.methods.tensor_parallel_plan import apply_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from train.settings import Settings


class Tp(Method):
    """Every parameter is a DTensor on the tensor dimension: sharded, or replicated and bitwise equal on all ranks."""

    grouped = True
    parallel = True
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "tensor-parallel models have no BatchNorm",
        "--no-buffer-sync": "tensor-parallel models have no BatchNorm",
        "--find-unused": "no gradients are reduced between replicas",
        "--join": "tensor-parallel ranks have the same batches",
        "--comm-hook": "no gradients are reduced between replicas",
        "--save-format safetensors": "the format cannot record the position of a shard in its tensor; use pth",
    }
    mesh: DeviceMesh

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a one-dimensional mesh: by default all ranks share one copy of the model."""
        degree = find_parallel_degree(settings, world_size)
        if degree != world_size:
            raise UserError(f"--parallel-degree {degree}: --method tp has one copy of the model; use fsdp_tp or ddp_tp")
        return {"tensor": degree}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to its device and shard it by its `tp_plan`."""
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        # 1a. Shard. Parameters become DTensors with this rank's rows or columns and the global shape.
        self.mesh = self.ctx.mesh.build(self.ctx.device.type)
        apply_plan(self.module, self.mesh["tensor"], self.settings)
        return self.module

    # 2. As in single.py. The optimizer is built after sharding, which replaces the model's parameters.

    def train(self, wrapped: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Add the gradient of one micro-batch."""
        # 3a. With --loss-parallel each rank computes cross-entropy from the logits of its part of the vocabulary.
        with self.use_sharded_logits():
            super().train(wrapped, x, y, compute_loss)

    def evaluate(self, x: Tensor, y: Tensor, measure: Callable[[Tensor, Tensor], object]) -> None:
        """Measure the outputs of the model for one batch; a collective of tensor-parallel ranks."""
        with self.use_sharded_logits():
            super().evaluate(x, y, measure)

    def use_sharded_logits(self) -> AbstractContextManager[None]:
        """Return the context in which cross-entropy takes logits sharded by classes, with --loss-parallel."""
        from torch.distributed.tensor.parallel import loss_parallel

        context: AbstractContextManager[None] = loss_parallel() if self.settings.loss_parallel else nullcontext()
        return context

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients with the layout of their parameters."""
        # 3. As in single.py: tensor-parallel ranks have the same samples.
        super().backward(loss)
        # 3b. With --sequence-parallel the gradient of a norm is a partial sum over this rank's tokens: all-reduce it.
        for parameter in self.module.parameters():
            gradient: Any = parameter.grad
            if gradient is not None and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
                parameter.grad = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]

    # 4. As in single.py. The scaler combines the overflow flags of all ranks' shards.
    # 5. As in single.py. The state dict has DTensors, so each file records shards and replicated tensors.
