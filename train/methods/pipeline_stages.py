"""Stages of a pipeline: parts of a GPT, assigned to ranks, and torch's schedules of their micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.errors import UserError, refuse
from train.mesh import local_part
from train.models.gpt import Gpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from train.settings import Settings

# torch's class for each --pipeline-schedule, and the number of stages of each rank.
PIPELINES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}


class Stage(Gpt):
    """The layers from `start` to `stop` of a GPT, the embedding before the first, the norm and head after the last.

    It shares the modules of the model. Autocast applies in training only, as in `Method.train`.
    """

    def __init__(self, model: Gpt, start: int, stop: int, autocast: Callable[[], AbstractContextManager[None]]) -> None:
        nn.Module.__init__(self)
        self.embed = self.norm = self.head = None
        if start == 0:
            self.embed = model.embed
        self.layers = model.layers[start:stop]
        if stop == len(model.layers):
            self.norm, self.head = model.norm, model.head
        self.autocast = autocast

    def forward(self, x: Tensor) -> Tensor:
        """x: bytes, or the output of the previous stage. Returns the input of the next stage, or logits."""
        if not torch.is_grad_enabled():
            return super().forward(x)
        with self.autocast():
            return super().forward(x)


def assign_stages(schedule: str | None, ranks: int) -> list[int]:
    """Return the rank of each stage: ranks take turns, but zbv returns, so that rank 0 has the first and last stage."""
    name, per_rank = PIPELINES[schedule or "1f1b"]
    first_turn = list(range(ranks))
    second_turn = list(range(ranks))
    if "ZBV" in name:
        second_turn.reverse()
    turns = first_turn + second_turn
    return turns[: ranks * per_rank]


def count_micro_batches(settings: Settings, ranks: int, copies: int) -> int:
    """Return the number of micro-batches of a step: --accumulate, or else one for each rank.

    ranks: of a pipeline. copies: of each stage. Raises UserError if the batches cannot be split evenly.
    """
    s, parts = settings, settings.accumulate
    if parts == 1:
        parts = ranks
    reason = "because all micro-batches have one size"
    refuse(
        (
            parts % ranks and s.pipeline_schedule != "gpipe",
            f"--accumulate {parts}: must be a multiple of {ranks} pipeline ranks, except for gpipe",
        ),
        (
            s.batch_size % (parts * copies),
            f"--method {s.method} --batch-size {s.batch_size}: must be a multiple of {parts * copies}, {reason}",
        ),
        (s.keep_last, f"--keep-last: not with --method {s.method}, {reason}"),
    )
    return parts


def split_model(
    model: Gpt, owners: list[int], rank: int, autocast: Callable[[], AbstractContextManager[None]]
) -> dict[int, Stage]:
    """Return the stages of a rank by number, and remove the other stages from the model. Raises UserError.

    The remaining parameters keep their names. owners: the rank of each stage.
    """
    depth, count = len(model.layers), len(owners)
    if depth < count:
        raise UserError(f"--depth {depth}: {count} pipeline stages need a layer each; use --depth {count} or more")
    stages: dict[int, Stage] = {}
    # The numbers of layers are part of their names, so a layer of another rank leaves an empty module.
    layers: list[nn.Module] = [nn.Identity() for _ in range(depth)]
    for number, owner in enumerate(owners):
        if owner == rank:
            start, stop = number * depth // count, (number + 1) * depth // count
            stages[number] = Stage(model, start, stop, autocast)
            layers[start:stop] = model.layers[start:stop]
    model.layers = nn.Sequential(*layers)
    if 0 not in stages:
        model.embed = None
    if count - 1 not in stages:
        model.norm = model.head = None
    return stages


def build_schedule(
    name: str | None,
    stages: Mapping[int, Stage],
    x: Tensor,
    sizes: tuple[int, int, int],
    loss: Any,
    group: ProcessGroup,
) -> Any:
    """Build torch's schedule for shares like x, [N, T].

    sizes: number of stages, micro-batches, and width of the model. loss: takes outputs and targets.
    """
    from torch.distributed import pipelining

    count, parts, width = sizes
    kind, per_rank = PIPELINES[name or "1f1b"]
    # With examples, the schedule does not run a micro-batch, and call the loss, to find the shapes. The last output is
    # not sent, so its example may have any shape.
    ids = x[: len(x) // parts]
    # Also under --amp, stages send activations in the dtype of the parameters.
    dtype = next(next(iter(stages.values())).parameters()).dtype
    hidden = torch.empty(*ids.shape, width, dtype=dtype, device=x.device, requires_grad=True)
    torch_stages = []
    for number, stage in stages.items():
        example = hidden
        if number == 0:
            example = ids
        torch_stages.append(pipelining.PipelineStage(stage, number, count, x.device, example, hidden, group=group))
    build = getattr(pipelining, kind)
    if per_rank == 1:
        return build(torch_stages[0], parts, loss_fn=loss, scale_grads=False)
    return build(torch_stages, parts, loss_fn=loss, scale_grads=False)


def add_gradient_of(twin: int, gradient: Any, group: ProcessGroup) -> None:
    """Exchange a gradient, or a shard of one, with another rank, and add both: a + b is bitwise equal to b + a."""
    mine = local_part(gradient)
    theirs = torch.empty_like(mine)
    exchange = [dist.P2POp(dist.isend, mine, twin, group), dist.P2POp(dist.irecv, theirs, twin, group)]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    mine += theirs
