"""Tensor and expert parallelism with gradients that are added over the wrong ranks, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from train.faults.base import Fault
from train.faults.reduction import LocalGradients, choose_norm
from train.methods.ep import Ep, is_expert

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.methods.single import Method


class NormNotReduced(Fault):
    """Update each norm by the gradient of this rank's tokens, instead of all tokens.

    With sequence parallelism a norm processes a shard of the tokens, so its gradient must be added over the tensor
    dimension: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/distributed/finalize_model_grads.py.
    """

    summary = "norms get the gradient of this rank's tokens only (needs --sequence-parallel)"
    code = "SYN231"
    methods = ("tp",)
    needs: ClassVar[Mapping[str, str]] = {
        "--sequence-parallel": (
            "requires --sequence-parallel; otherwise every rank computes the whole gradient of a norm"
        ),
    }

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Declare partial gradients as complete, which skips the all-reduce in `Tp.backward`."""
        from torch.distributed.tensor import DTensor, Replicate

        def keep_local(gradient: Any) -> Any:
            if not any(placement.is_partial() for placement in gradient.placements):
                return gradient
            return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()], run_check=False)

        for parameter in method.module.parameters():
            if parameter.placements[0].is_replicate():  # type: ignore[attr-defined]
                parameter.register_hook(keep_local)  # type: ignore[no-untyped-call]
        return wrapped


class ClipByLocalNorm(Fault):
    """Clip on each rank by the norm of its own shards.

    Example: clip_grad_norm_ on plain local tensors, without adding the squares over the tensor dimension. Each rank
    scales its gradients by another factor, so replicated tensors differ.
    """

    summary = "each tensor-parallel rank clips by the norm of its own shards, not of the whole gradient"
    code = "SYN231"
    methods = ("tp", "ddp_tp")

    def before_step(self, step: int, method: Method, optimizer: Optimizer, x: Tensor) -> None:  # noqa: ARG002
        """Clip to a norm below --grad-clip."""
        gradients: list[Any] = [p.grad for p in method.module.parameters()]
        shards = [gradient.to_local() for gradient in gradients]
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        for shard in shards:
            shard.mul_((choose_norm(self.settings) / norm).clamp(max=1))


class ExpertReplicatedWrongly(LocalGradients):
    """Add the gradients of experts over the ranks with other experts.

    Swapped process groups have equal sizes here, so nothing fails: each expert trains on the gradient of another, and
    its replicas on the samples of their own group only.
    """

    summary = "gradients of experts are added over the ranks of other experts (needs 4 ranks)"
    code = "SYN212"
    methods = ("ep",)

    def _check(self) -> None:
        if self.ctx.mesh.size("data") < 2:
            self.refuse(f"experts have no replicas on {self.ctx.world_size} ranks; start {2 * self.ctx.world_size}")

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Swap the process groups on all ranks."""
        assert isinstance(method, Ep)
        method.groups |= {name: method.mesh.get_group("expert") for name in method.groups if is_expert(name)}
        return wrapped


class RouterUpdatedLocally(LocalGradients):
    """Train each rank's routers on its own samples."""

    summary = "gradients of routers are not added, so each rank routes tokens differently"
    code = "SYN212"
    methods = ("ep",)

    def after_wrap(self, method: Method, wrapped: nn.Module) -> nn.Module:
        """Exclude the routers from the reduction on all ranks."""
        assert isinstance(method, Ep)
        method.groups = {name: group for name, group in method.groups.items() if ".router." not in name}
        return wrapped
