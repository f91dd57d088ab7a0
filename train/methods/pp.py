"""Pipeline parallelism: each rank has some of the layers, and a schedule sends micro-batches through all of them.

Compare with single.py: equal numbers mark the same steps. A schedule of torch owns forward and backward: it sends
activations to the next stage and their gradients back, so that stages work on different micro-batches at the same time.
https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from train.errors import UserError
from train.methods.single import Method, find_parallel_degree
from train.models.gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from torch.distributed.device_mesh import DeviceMesh

    from train.settings import Settings

# torch's class for each --pipeline-schedule, and the number of stages of each rank.
PIPELINES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}


class Stage(Gpt):
    """A part of a GPT, which shares its modules: the layers from `start` to `stop`, and what is before or after."""

    def __init__(self, model: Gpt, start: int, stop: int, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        nn.Module.__init__(self)
        last = stop == len(model.layers)
        self.embed, self.layers = model.embed if start == 0 else None, model.layers[start:stop]
        self.norm, self.head = (model.norm, model.head) if last else (None, None)
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage, in training under --amp. x: bytes, or the output of the previous stage."""
        with self.autocast() if torch.is_grad_enabled() else nullcontext():
            return super().forward(x)


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
        "--comm-hook": "DDP's hooks need DDP",
    }
    default_degree: ClassVar[int | None] = None
    copies: ClassVar[str] = "data"
    mesh: DeviceMesh
    schedule: Any = None

    @classmethod
    def mesh_shape(cls, settings: Settings, world_size: int) -> dict[str, int]:
        """Return the mesh of stages and their copies. Raises UserError if ranks or batch sizes do not fit."""
        ranks = find_parallel_degree(settings, world_size, cls.default_degree)
        parts, copies = settings.accumulate if settings.accumulate > 1 else ranks, world_size // ranks
        if parts % ranks and settings.pipeline_schedule != "gpipe":
            raise UserError(
                f"--accumulate {parts}: must be a multiple of the {ranks} ranks of a pipeline, except for gpipe"
            )
        if settings.batch_size % (parts * copies):
            given, needed = f"--method {settings.method} --batch-size {settings.batch_size}", parts * copies
            raise UserError(f"{given}: must be a multiple of {needed}, because all micro-batches have one size")
        if settings.keep_last:
            raise UserError(f"--keep-last: not with --method {settings.method}: all micro-batches have one size")
        return {"pipeline": ranks, cls.copies: copies}

    @property
    def metadata_fields(self) -> dict[str, Any]:
        """Report the mesh coordinates of this rank, and the tensors that are copies of each other."""
        return {"mesh": self.ctx.mesh.coordinates, "tied": self.tied}

    def wrap(self, model: nn.Module) -> nn.Module:
        """Keep the stages of this rank, under the names in the whole model."""
        if not isinstance(model, Gpt) or model.embed is None or model.head is None:
            method = self.settings.method
            raise UserError(f"--model {self.settings.model}: --method {method} splits only gpt-tiny and gpt-tiny-moe")
        # 1a. Assign layers to stages, and stages to ranks in turn. zbv returns: rank 0 has the first and last stage.
        kind, per_rank = PIPELINES[self.settings.pipeline_schedule or "1f1b"]
        ranks, me = self.ctx.mesh.size("pipeline"), self.ctx.mesh.coordinate("pipeline")
        depth, count = len(model.layers), ranks * per_rank
        if depth < count:
            raise UserError(f"--depth {depth}: {count} pipeline stages need a layer each; use --depth {count} or more")
        self.owners = [*range(ranks), *(reversed(range(ranks)) if "ZBV" in kind else range(ranks))][:count]
        self.last, starts = count - 1, [i * depth // count for i in range(count + 1)]
        # 1. Move the parameters and buffers to the device.
        self.module, self.width = model.to(self.ctx.device), model.embed.embedding_dim
        self.vocabulary = model.head.out_features
        self.tied = {"head.weight": "embed.weight"} if model.head.weight is model.embed.weight else {}
        self.stages = {
            i: Stage(model, starts[i], starts[i + 1], self.autocast) for i in range(count) if self.owners[i] == me
        }
        # 1b. Remove everything else. The place of a removed layer remains, so that the others keep their names.
        mine = {layer for i in self.stages for layer in range(starts[i], starts[i + 1])}
        model.layers = nn.Sequential(*(layer if i in mine else nn.Identity() for i, layer in enumerate(model.layers)))
        model.embed = model.embed if 0 in self.stages else None
        model.norm, model.head = (model.norm, model.head) if self.last in self.stages else (None, None)
        self.mesh = self.ctx.mesh.build(self.ctx.device.type)
        self.group = self.mesh.get_group("pipeline")
        # The copy of a tied embedding on this rank, if another rank has the other copy.
        self.copy = (model.embed or model.head) if self.tied and (model.embed is None) != (model.head is None) else None
        return self.module

    # 2. As in single.py: each rank updates the parameters of its stages.

    def split(self, x: Tensor, y: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the whole share: the schedule splits it."""
        if self.schedule is None:
            self.schedule = self.build_schedule(x)
        return [(x, y)]

    def build_schedule(self, x: Tensor) -> Any:
        """Build torch's schedule for shares like x, [N, T]."""
        from torch.distributed import pipelining

        kind, per_rank = PIPELINES[self.settings.pipeline_schedule or "1f1b"]
        parts = self.settings.accumulate if self.settings.accumulate > 1 else self.ctx.mesh.size("pipeline")
        # Without examples, the schedule would run the first micro-batch one more time to find the shapes.
        ids = x[: len(x) // parts]
        hidden = torch.empty(*ids.shape, self.width, device=x.device, requires_grad=True)
        logits = torch.empty(*ids.shape, self.vocabulary, device=x.device, requires_grad=True)
        stages = [
            pipelining.PipelineStage(
                stage,
                i,
                len(self.owners),
                x.device,
                hidden if i else ids,
                logits if i == self.last else hidden,
                group=self.group,
            )
            for i, stage in self.stages.items()
        ]
        build = getattr(pipelining, kind)
        return build(
            stages if per_rank > 1 else stages[0], parts, lambda o, t: self.compute_loss(o, t), scale_grads=False
        )

    def train(self, forward: nn.Module, x: Tensor, y: Tensor, compute_loss: Callable[[Tensor, Tensor], Tensor]) -> None:  # noqa: ARG002
        """Run the schedule: forward and backward of all micro-batches, in all stages."""

        def compute(outputs: Tensor, targets: Tensor) -> Tensor:
            with self.autocast():
                return compute_loss(outputs, targets)

        # 3. Only the first stage has inputs, and only the last computes the loss.
        self.compute_loss = compute
        self.schedule.step(*([x] if 0 in self.stages else []), target=y if self.last in self.stages else None)
        # 3a. Add the gradients of all samples, then of both copies of the embedding.
        self.reduce_gradients()
        self.add_tied_gradient()

    def reduce_gradients(self) -> None:
        """Add the gradients of the copies of this rank's stages."""
        if self.ctx.mesh.data_size > 1:
            for gradient in (p.grad for p in self.module.parameters() if p.grad is not None):
                dist.all_reduce(gradient, group=self.mesh.get_group(self.copies))

    def add_tied_gradient(self) -> None:
        """Add the gradient of the embedding's other copy. The sum does not depend on the order, so both stay equal."""
        if self.copy is None:
            return
        mine = get_local(self.copy.weight.grad)
        theirs = torch.empty_like(mine)
        other = dist.get_global_rank(self.group, self.owners[-1] if 0 in self.stages else 0)
        operations = [
            dist.P2POp(dist.isend, mine, other, self.group),
            dist.P2POp(dist.irecv, theirs, other, self.group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        mine += theirs

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the norm over all stages. The embedding counts once, in the first stage."""
        skipped = self.copy.weight if self.copy is not None and 0 not in self.stages else None
        norm = get_total_norm([p.grad for p in self.module.parameters() if p is not skipped and p.grad is not None])
        square = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
        dist.all_reduce(square, group=self.group)
        clip_grads_with_norm_(self.module.parameters(), max_norm, square.sqrt())
        return square.sqrt()

    def evaluate(self, x: Tensor, y: Tensor, measure: Callable[[Tensor, Tensor], object]) -> None:
        """Send one batch of any size through the stages, and measure the outputs of the last."""
        me = self.ctx.mesh.coordinate("pipeline")
        for i, owner in enumerate(self.owners):
            sender = self.owners[i - 1] if i else owner
            if sender != owner and me == sender:
                dist.send(x, dist.get_global_rank(self.group, owner), self.group)
            elif sender != owner and me == owner:
                x = torch.empty(*y.shape, self.width, device=y.device)
                dist.recv(x, dist.get_global_rank(self.group, sender), self.group)
            x = self.stages[i](x) if i in self.stages else x
        if self.last in self.stages:
            measure(x, y)

    def share_sums(self, sums: Tensor) -> Tensor:
        """Copy the sums of the last stage to the other stages."""
        dist.broadcast(sums, dist.get_global_rank(self.group, self.owners[-1]), self.group)
        return sums

    # 4. As in single.py. 5. As in single.py: the state dict has only the names of this rank's stages.


def get_local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, without a copy; another tensor as it is."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
