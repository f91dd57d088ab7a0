"""Why ddp is as much faster as it is: the parts of its step, each measured alone, in turns."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from train.bench.ranks import seconds
from train.job import build_optimizer, load, make_model
from train.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

STEPS = 3  # in a row, each time


def parts(settings: Settings, ctx: RankContext, rounds: int) -> dict[str, Any]:
    """Time what a step of ddp consists of, `rounds` times after one that warms up; a collective.

    Returns medians, in seconds a step:
    whole: one process, alone, on the whole global batch. share: one process, alone, on a rank's share of it. together:
    all ranks on their shares at once, each for itself, so without any communication. ddp: the same under DDP. reduce:
    an all-reduce of as many bytes as the gradient has, alone. And gradient_bytes.
    """
    data = load(settings, ctx)
    x, y = (column.to(ctx.device) for column in data.train[: settings.batch_size])
    mine = slice(ctx.rank, None, ctx.world_size)
    method = METHODS["ddp"](settings, ctx)
    torch.manual_seed(settings.seed)
    forward = method.wrap(make_model(settings, data))
    optimizer = build_optimizer(settings, method)
    gradient = torch.zeros(sum(p.numel() for p in method.module.parameters()), device=ctx.device)
    work: dict[str, Callable[[], object]] = {
        "whole": lambda: _step(method.module, optimizer, x, y) if ctx.is_main else None,
        "share": lambda: _step(method.module, optimizer, x[mine], y[mine]) if ctx.is_main else None,
        "together": lambda: _step(method.module, optimizer, x[mine], y[mine]),
        "ddp": lambda: _step(forward, optimizer, x[mine], y[mine]),
        "reduce": lambda: dist.all_reduce(gradient),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, step in work.items():
            ctx.gather(None)  # all begin together; those that have nothing to do wait without using a core
            took = seconds(lambda: [step() for _ in range(STEPS)], ctx.device) / STEPS  # noqa: B023 - called at once
            if turn:
                times[name].append(max(ctx.gather(took)))
            else:
                ctx.gather(took)
    return {name: statistics.median(t) for name, t in times.items()} | {
        "gradient_bytes": gradient.numel() * gradient.element_size()
    }


def _step(forward: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(forward(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def explain(found: dict[str, Any], ranks: int) -> str:
    """Say in a few lines where the time goes, and so what the speed-up of ddp can be."""
    whole, ddp, megabytes = found["whole"], found["ddp"], found["gradient_bytes"] / 1e6
    exposed = 100 * (ddp - found["together"]) / ddp
    lines = (
        ("one process, the global batch", whole, ""),
        ("one process, a rank's share", found["share"], f"of {ranks}; less by what smaller batches lose"),
        (f"{ranks} processes, no messages", found["together"], "less by what they lose to each other: the limit"),
        (f"{ranks} processes, DDP", ddp, f"{exposed:.1f} % of the step waits for the all-reduce"),
    )
    text = [
        f"{what:30} {1000 * took:8.1f} ms a step {whole / took:5.2f} x  {note}".rstrip() for what, took, note in lines
    ]
    return "\n".join([*text, f"{f'an all-reduce of {megabytes:.1f} MB':30} {1000 * found['reduce']:8.1f} ms"])
