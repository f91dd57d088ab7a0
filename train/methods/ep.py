"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to the ranks of their experts.

Compare with ddp.py: all ranks have different samples, and all ranks hold the remaining layers. The memory of experts is
divided by the number of ranks (GShard, https://arxiv.org/abs/2006.16668). With 2 ranks to a group, on 4 ranks, ranks 0
and 2 hold the first half of the experts, and ranks 1 and 3 the second half.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from train.errors import UserError
from train.methods.single import Method, Replica, find_parallel_degree
from train.models.gpt import EXPERTS, Experts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

DEGREE = 2


class Ep(Method):
    """Experts are equal on ranks with the same expert coordinate, and all other parameters on all ranks.

    groups: the ranks that hold each parameter, by name; None for all ranks.
    """

    grouped = True
    parallel: ClassVar[bool] = True
    refuses: ClassVar[Mapping[str, str]] = {}

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        super().__init__(settings, ctx)
        self.groups: dict[str, ProcessGroup | None] = {}
        self.reduces = True

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return a two-dimensional mesh: each row holds all experts once. Raises UserError."""
        degree = find_parallel_degree(settings, world_size, DEGREE)
        if EXPERTS % degree:
            raise UserError(f"--parallel-degree {degree}: cannot divide {EXPERTS} experts; use 2 or 4")
        return {"data": world_size // degree, "expert": degree}

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report the mesh coordinate of this rank."""
        return {**super().metadata_fields, "mesh": self.ctx.mesh.coordinates}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep this rank's experts. Raises UserError."""
        self.mesh = self.ctx.mesh.build(self.ctx.device.type)
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        if not layers:
            raise UserError(f"--model {self.settings.model}: has no experts to divide; use gpt-tiny-moe")
        # 1a. Remove the experts of other ranks. Names keep the numbers of all experts: "experts.2.gate.weight".
        count, first = EXPERTS // self.ctx.mesh.size("expert"), self.ctx.mesh.coordinate("expert")
        for layer in layers:
            own = {str(i): layer.experts[i] for i in range(first * count, (first + 1) * count)}
            layer.experts = nn.ModuleDict(own)  # type: ignore[assignment]
            layer.apply_experts = send_to_experts(list(own.values()), self.mesh.get_group("expert"))  # type: ignore[method-assign]
        # 1. Move the parameters and buffers to the device. Nothing is broadcast: all ranks start from one seed.
        self.module = model.to(self.ctx.device)
        # 1b. The gradient of an expert is reduced over its replicas, all other gradients over all ranks.
        for name, _ in self.module.named_parameters():
            self.groups[name] = self.mesh.get_group("data") if is_expert(name) else None
        return self.module

    def build_optimizer(self, kind: type[Optimizer], **arguments: Any) -> Optimizer:
        """Build the optimizer for this rank's parameters."""
        # 2. As in single.py.
        optimizer = super().build_optimizer(kind, **arguments)
        # 5b. Its state is saved like the parameters, see `state`.
        optimizer.register_state_dict_post_hook(self.mark_replicated_state)
        return optimizer

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients on this rank until the last micro-batch. Tokens are exchanged in any case."""
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients and add them over all ranks that hold the parameter."""
        # 3. Every rank must call backward equally often, because tokens' gradients are exchanged too. The gradient of
        #    an expert then contains the tokens of all ranks in the group.
        loss.backward()  # type: ignore[no-untyped-call]
        # 3a. The losses of all ranks add up to the global mean, so gradients are added, not averaged.
        if self.reduces:
            for name, parameter in self.module.named_parameters():
                dist.all_reduce(parameter.grad, group=self.groups[name])

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients if the norm over all experts and the other parameters exceeds `max_norm`."""
        # 3b. Each rank adds the squared norm of its own experts, and the parameters of all ranks count once.
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                gradients[is_expert(name)].append(parameter.grad)
        squared = get_total_norm(gradients[True]) ** 2
        dist.all_reduce(squared, group=self.mesh.get_group("expert"))
        norm = (squared + get_total_norm(gradients[False]) ** 2).sqrt()
        clip_grads_with_norm_(self.module.parameters(), max_norm, norm)
        return norm

    # 4. As in single.py. Equal parameters and equal gradients stay equal without communication.

    def state(self, optimizer: Optimizer) -> list[Replica]:
        """Return this rank's experts, and the other parameters."""
        # 5a. Mark tensors of all ranks as replicated. Otherwise syncheck would compare them like experts, only between
        #     ranks with the same expert coordinate.
        state = self.module.state_dict()
        return [Replica({name: self.mark_replicated(name, tensor) for name, tensor in state.items()}, optimizer)]

    def mark_replicated(self, name: str, tensor: Tensor) -> Tensor:
        """Return the tensor as a DTensor that all ranks hold, except for experts."""
        from torch.distributed.tensor import DTensor, Replicate

        if is_expert(name) or not isinstance(tensor, Tensor):
            return tensor
        return DTensor.from_local(tensor, self.mesh, [Replicate(), Replicate()], run_check=False)

    def mark_replicated_state(self, _: Optimizer, state: dict[str, Any]) -> None:
        """Replace tensors in the optimizer's state dict."""
        for index, (name, _parameter) in enumerate(self.module.named_parameters()):
            if values := state["state"].get(index):
                state["state"][index] = {key: self.mark_replicated(name, value) for key, value in values.items()}


def is_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert, by its name."""
    return ".experts." in name


def send_to_experts(experts: list[nn.Module], group: ProcessGroup) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a replacement for `Experts.apply_experts`. experts: of this rank."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd  # takes half a second

    own, ranks = len(experts), group.size()

    def apply_experts(tokens: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        # Sort the pairs of token and expert by expert, and so by rank, because ranks hold consecutive experts.
        order = expert_ids.flatten().argsort(stable=True)
        counts = expert_ids.flatten().bincount(minlength=EXPERTS)
        # Exchange the number of tokens for each expert, so that every rank knows the lengths of its messages.
        arriving = torch.empty_like(counts)  # for each rank and expert
        dist.all_to_all_single(arriving, counts, group=group)
        sent, received = (n.view(ranks, -1).sum(1).tolist() for n in (counts, arriving))
        inputs = all_to_all_single_autograd(tokens[order // expert_ids.shape[1]], received, sent, group)
        # They arrive by rank, then by expert: sort by expert.
        numbers = torch.arange(own, device=tokens.device).repeat(ranks).repeat_interleave(arriving)
        by_expert = numbers.argsort(stable=True)
        parts = inputs[by_expert].split(numbers.bincount(minlength=own).tolist())
        # An expert without tokens computes an empty output, so that its parameters get gradients of zero.
        outputs = torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])
        # Send the outputs back, and undo both sorts.
        outputs = all_to_all_single_autograd(outputs[by_expert.argsort()], sent, received, group)
        by_token = outputs[order.argsort()].view(*expert_ids.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    return apply_experts
