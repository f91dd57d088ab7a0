"""Pipeline parallelism: each rank has some of the layers, and a schedule sends micro-batches through all of them.

Compare with single.py: equal numbers mark the same steps. A schedule of torch owns forward and backward: it sends
activations to the next stage and their gradients back, so that stages work on different micro-batches at the same time.
https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from train.mesh import find_parallel_degree, gather_whole, refuse_model
from train.methods.pipeline_stages import (
    add_gradient_of,
    assign_stages,
    build_schedule,
    count_micro_batches,
    split_model,
)
from train.methods.single import Method
from train.models.gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from train.settings import Settings


class Pp(Method):
    """Ranks along the mesh dimension `pipeline` have different layers; ranks along `data` have copies of them.

    All ranks must start from one seed, because nothing is broadcast. If the embedding is also the weight of the last
    layer, the first and the last stage each have a copy, and add the gradients of both.
    """

    grouped = True
    parallel = True
    refuses: ClassVar[Mapping[str, str]] = {
        "--sync-bn": "gpt-tiny and gpt-tiny-moe have no BatchNorm",
        "--no-buffer-sync": "gpt-tiny and gpt-tiny-moe have no buffers",
        "--amp fp16": "each rank would find overflows in its own stages only, and skip other steps; use bf16",
        "--find-unused": "gradients are added after the backward of all micro-batches",
        "--join": "the schedule needs all ranks in every step",
        "--compile": "the schedule calls the stages, not the compiled model",
        "--comm-hook": "DDP's hooks need the wrapper of DDP",
    }
    default_degree: ClassVar[int | None] = None
    copies: ClassVar[str] = "data"
    mesh: DeviceMesh
    schedule: Any = None

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return the mesh of stages and their copies. Raises UserError if ranks or batch sizes do not fit."""
        ranks = find_parallel_degree(settings, world_size, cls.default_degree)
        copies = world_size // ranks
        count_micro_batches(settings, ranks, copies)
        return {"pipeline": ranks, cls.copies: copies}

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report the tensors that are copies of each other."""
        return super().metadata_fields | {"tied": self.tied}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep the stages of this rank. Raises UserError for a model that cannot be split."""
        s, mesh = self.settings, self.ctx.mesh
        if not isinstance(model, Gpt) or model.embed is None or model.head is None:
            raise refuse_model(s, "splits only the models of train/models/gpt.py")
        self.width = model.embed.embedding_dim
        self.tied = {"head.weight": "embed.weight"} if model.head.weight is model.embed.weight else {}
        # 1a. Split the model. Two stages of a rank are not neighbors, except at the turning point of zbv.
        self.owners = assign_stages(s.pipeline_schedule, mesh.size("pipeline"))
        self.last = len(self.owners) - 1
        self.stages = split_model(model, self.owners, mesh.coordinate("pipeline"), self.autocast)
        # 1. Move the parameters and buffers to the device.
        self.module = model.to(self.ctx.device)
        self.mesh = mesh.build(self.ctx.device.type)
        self.group = self.mesh.get_group("pipeline")
        # The layer with a copy of a tied embedding on this rank, if another rank has the other copy.
        self.copy = None
        if self.tied and (model.embed is None) != (model.head is None):
            self.copy = model.embed or model.head
        return self.module

    # 2. As in single.py: each rank updates the parameters of its stages.

    def split(self, x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the whole share: the schedule splits it."""
        if self.schedule is None:
            ranks = self.ctx.mesh.size("pipeline")
            sizes = len(self.owners), count_micro_batches(self.settings, ranks, self.ctx.mesh.data_size), self.width
            self.schedule = build_schedule(
                self.settings.pipeline_schedule, self.stages, x, sizes, lambda o, t: self.compute_loss(o, t), self.group
            )
        return [(x, y)]

    def train(
        self, _wrapped: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Run the schedule: forward and backward of all micro-batches, in all stages."""
        self.compute_loss = self.autocast()(compute_loss)  # type: ignore[operator]  # also a decorator
        # 3. Only the first stage has inputs, and only the last computes the loss.
        inputs: list[Tensor] = []
        target = None
        if 0 in self.stages:
            inputs.append(x)
        if self.last in self.stages:
            target = y
        self.schedule.step(*inputs, target=target)
        # 3a. Add the gradients of all samples, then of both copies of the embedding.
        self.reduce_gradients()
        self.add_tied_gradient()

    def reduce_gradients(self) -> None:
        """Add the gradients of the copies of this rank's stages."""
        for gradient in (p.grad for p in self.module.parameters() if p.grad is not None):
            dist.all_reduce(gradient, group=self.mesh.get_group(self.copies))

    def add_tied_gradient(self) -> None:
        """Add the gradient of the embedding's other copy."""
        if self.copy is not None:
            twin_stage = self.last
            if self.last in self.stages:
                twin_stage = 0
            add_gradient_of(self.find_global_rank(twin_stage), self.copy.weight.grad, self.group)

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages. Both copies of the embedding count once."""
        gradients = []
        for parameter in self.module.parameters():
            is_second_copy = self.copy is not None and parameter is self.copy.weight and 0 not in self.stages
            if parameter.grad is not None and not is_second_copy:
                gradients.append(parameter.grad)
        norm = get_total_norm(gradients)
        square: Tensor = gather_whole(norm) ** 2
        dist.all_reduce(square, group=self.group)
        clip_grads_with_norm_(self.module.parameters(), max_norm, square.sqrt())
        return square.sqrt()

    def evaluate(self, x: Tensor, y: Tensor, measure: Callable[[Tensor, Tensor], object]) -> None:
        """Send one batch of any size through the stages, and measure the outputs of the last."""
        for number, stage in sorted(self.stages.items()):
            # The stage before the first stage, and after the last, does not exist. Neighboring stages of one rank
            # need no message.
            previous, following = number - 1, number + 1
            if number > 0 and previous not in self.stages:
                x = torch.empty(*y.shape, self.width, device=y.device)
                dist.recv(x, self.find_global_rank(previous), self.group)
            x = stage(x)
            if number < self.last and following not in self.stages:
                dist.send(x, self.find_global_rank(following), self.group)
        if self.last in self.stages:
            measure(x, y)

    def find_global_rank(self, stage: int) -> int:
        """Return the rank with a stage in this rank's pipeline."""
        return dist.get_global_rank(self.group, self.owners[stage])

    def share_sums(self, sums: Tensor) -> Tensor:
        """Return the sums of the last stage."""
        # A collective needs contiguous memory.
        shared = sums.clone()
        dist.broadcast(shared, self.find_global_rank(self.last), self.group)
        return shared

    # 4. and 5. as in single.py: the state dict has only the names of this rank's stages.
