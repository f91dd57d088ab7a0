"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to the ranks of their experts.

Compare with ddp.py: all ranks have different samples and hold all other layers. The memory for experts is divided by
the number of ranks (GShard, https://arxiv.org/abs/2006.16668). On 4 ranks in groups of 2, ranks 0 and 2 hold the first
half of the experts, and ranks 1 and 3 the second half.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from train.errors import UserError
from train.mesh import find_parallel_degree
from train.methods.base import Replica
from train.methods.single import Method
from train.models.gpt import EXPERTS, Experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from train.settings import Settings


class Ep(Method):
    """Experts are equal on ranks with the same expert coordinate, and all other parameters on all ranks.

    groups: the ranks over which the gradient of each parameter is added, by name; None for all ranks.
    """

    grouped = True
    parallel: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "its models have no BatchNorm",
        "--no-buffer-sync": "its models have no buffers",
        "--amp fp16": "each rank would detect overflows of its own experts and skip different steps; use bf16",
        "--find-unused": "gradients are added after backward, so an unused parameter would be an error",
        "--join": "the remaining ranks need the experts of a rank without batches",
        "--comm-hook": "gradients are added without DDP, whose hooks compress them",
        "--save-format safetensors": "the format cannot record that all ranks hold a tensor; use pth",
    }
    reduces = True

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a two-dimensional mesh: each row holds all experts once. Raises UserError."""
        degree = find_parallel_degree(settings, world_size, 2)
        if EXPERTS % degree:
            raise UserError(f"--parallel-degree {degree}: cannot divide {EXPERTS} experts; use 2 or 4")
        return {"data": world_size // degree, "expert": degree}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep this rank's experts. Raises UserError."""
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        if not layers:
            raise UserError(f"--model {self.settings.model}: has no experts for --method ep; use gpt-tiny-moe")
        self.mesh = self.ctx.mesh.build(self.ctx.device.type)
        # 1a. Remove the experts of other ranks. Names keep the numbers of all experts: "experts.2.gate.weight".
        count, coordinate = EXPERTS // self.ctx.mesh.size("expert"), self.ctx.mesh.coordinate("expert")
        for layer in layers:
            first = coordinate * count
            local_experts = {str(number): layer.experts[number] for number in range(first, first + count)}
            layer.experts = nn.ModuleDict(local_experts)  # type: ignore[assignment]
            layer.apply_experts = send_to_experts(list(local_experts.values()), self.mesh.get_group("expert"))  # type: ignore[assignment,method-assign]
        # 1. Move the parameters and buffers to the device. Nothing is broadcast: all ranks start from one seed.
        self.module = model.to(self.ctx.device)
        # 1b. An expert's gradient is added over its replicas, every other gradient over all ranks.
        groups = {True: self.mesh.get_group("data"), False: None}
        self.groups = {name: groups[is_expert(name)] for name, _ in self.module.named_parameters()}
        return self.module

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer for this rank's parameters."""
        # 2. As in single.py. Its state is saved like the parameters, see `list_replicas`.
        optimizer = super().build_optimizer(kind, **arguments)
        optimizer.register_state_dict_post_hook(self.mark_optimizer_state)
        return optimizer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank until the last micro-batch. Tokens are always exchanged."""
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients, and add them over the ranks that hold the parameter."""
        # 3. Every rank must call backward equally often, because gradients of tokens are exchanged too. The gradient of
        #    an expert then contains the tokens of all ranks in the group.
        loss.backward()  # type: ignore[no-untyped-call]
        # 3a. The losses of all ranks add up to the global mean, so gradients are added, not averaged.
        if not self.reduces:
            return
        for name, group in self.groups.items():
            dist.all_reduce(self.module.get_parameter(name).grad, group=group)  # type: ignore[arg-type]

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients by the norm over all experts and the other parameters, each counted once."""
        expert_gradients, shared_gradients = [], []
        for name, parameter in self.module.named_parameters():
            if parameter.grad is None:
                continue
            if is_expert(name):
                expert_gradients.append(parameter.grad)
            else:
                shared_gradients.append(parameter.grad)
        squared = get_total_norm(expert_gradients) ** 2
        dist.all_reduce(squared, group=self.mesh.get_group("expert"))
        norm = (squared + get_total_norm(shared_gradients) ** 2).sqrt()
        clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    # 4. As in single.py. Equal parameters and equal gradients stay equal without communication.

    def list_replicas(self, optimizer: Optimizer) -> list[Replica]:
        """Return this rank's experts, and the other parameters."""
        return [Replica(self.mark_model(), optimizer)]

    @property
    def monitored(self) -> Any:
        """An object of a class `model` with the marked tensors: syncheck names tensors by it, as in the files."""
        return type("model", (), {"state_dict": staticmethod(self.mark_model)})()

    def mark_model(self) -> dict[str, Tensor]:
        """Return the state dict of the module with marked tensors, not copied."""
        return {name: self.mark(name, tensor) for name, tensor in self.module.state_dict().items()}

    def mark_optimizer_state(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Mark the tensors in a state dict of the optimizer."""
        for index, (name, _parameter) in enumerate(self.module.named_parameters()):
            if index in state["state"]:
                state["state"][index] = {k: self.mark(name, v) for k, v in state["state"][index].items()}

    def mark(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor of a parameter as a DTensor that all ranks hold, except for experts.

        syncheck compares experts only between ranks with the same expert coordinate, and other tensors on all ranks.
        """
        from torch.distributed.tensor import DTensor, Replicate

        return tensor if is_expert(name) else DTensor.from_local(tensor, self.mesh, [Replicate()] * 2, run_check=False)


def is_expert(name: str) -> bool:
    """Return whether the parameter of this name belongs to an expert."""
    return ".experts." in name


def send_to_experts(experts: list[nn.Module], group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a replacement for `Experts.apply_experts`. experts: of this rank."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd  # takes half a second

    expert_count, ranks = len(experts), group.size()

    def apply_experts(tokens: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        # Sort the pairs of token and expert by expert, and so by rank, because ranks hold consecutive experts.
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=EXPERTS)
        # Exchange the number of tokens for each expert, so that every rank knows the lengths of its messages.
        arriving = torch.empty_like(counts)  # by rank, then by expert
        dist.all_to_all_single(arriving, counts, group=group)
        outgoing, incoming = (numbers.view(ranks, -1).sum(1).tolist() for numbers in (counts, arriving))
        inputs = all_to_all_single_autograd(tokens[order // expert_ids.shape[1]], incoming, outgoing, group)
        # Sort the received tokens by expert. An expert without tokens computes an empty output, and gets gradients.
        numbers = torch.arange(expert_count, device=tokens.device).repeat(ranks).repeat_interleave(arriving)
        by_expert = numbers.argsort(stable=True)
        parts = torch.split(inputs[by_expert], numbers.bincount(minlength=expert_count).tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        # Send the outputs back, and undo both sorts.
        outputs = all_to_all_single_autograd(outputs[by_expert.argsort()], outgoing, incoming, group)
        by_token = outputs[order.argsort()].view(*expert_ids.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    return apply_experts
