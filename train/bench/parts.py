"""Measures the parts of a DDP step separately and in turns, to explain the speed-up of ddp."""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from train.bench.ranks import measure_in_turns
from train.job import build_optimizer, load, make_model
from train.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from train.launch import RankContext
    from train.settings import Settings

STEPS = 3  # consecutive steps per measurement


def measure_parts(settings: Settings, ctx: RankContext, rounds: int) -> dict[str, Any]:
    """Time the parts of a DDP step, `rounds` times after a round for warm-up; a collective.

    Returns gradient_bytes, and these medians in seconds per step:

    - whole: a single process on the whole global batch, while the other ranks are idle;
    - share: a single process on a rank's share, while the other ranks are idle;
    - together: all ranks on their shares at the same time, without communication;
    - ddp: all ranks on their shares with DDP;
    - reduce: an all-reduce of the size of the gradient, without computation.
    """
    data = load(settings, ctx)
    x, y = (column.to(ctx.device) for column in data.train[: settings.batch_size])
    share = slice(ctx.rank, None, ctx.world_size)
    method = METHODS["ddp"](settings, ctx)
    torch.manual_seed(settings.seed)
    forward = method.wrap(make_model(settings, data))
    optimizer = build_optimizer(settings, method)
    gradient = torch.zeros(sum(p.numel() for p in method.module.parameters()), device=ctx.device)
    parts: dict[str, Callable[[], object]] = {
        "whole": lambda: train_step(method.module, optimizer, x, y) if ctx.is_main else None,
        "share": lambda: train_step(method.module, optimizer, x[share], y[share]) if ctx.is_main else None,
        "together": lambda: train_step(method.module, optimizer, x[share], y[share]),
        "ddp": lambda: train_step(forward, optimizer, x[share], y[share]),
        "reduce": lambda: dist.all_reduce(gradient),
    }
    times = measure_in_turns({name: partial(_repeat, part) for name, part in parts.items()}, ctx, rounds)
    return {name: statistics.median(seconds) / STEPS for name, seconds in times.items()} | {
        "gradient_bytes": gradient.numel() * gradient.element_size()
    }


def _repeat(part: Callable[[], object]) -> None:
    for _ in range(STEPS):
        part()


def train_step(forward: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """Train one step without metrics, schedule or checks."""
    F.cross_entropy(forward(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def format_parts(parts: dict[str, Any], ranks: int) -> str:
    """Format the measured parts, with their speed-ups over one process."""
    whole, ddp, megabytes = parts["whole"], parts["ddp"], parts["gradient_bytes"] / 1e6
    exposed = 100 * (ddp - parts["together"]) / ddp
    rows = (
        ("1 process, global batch", whole, ""),
        ("1 process, a rank's share", parts["share"], f"{ranks} if speed did not depend on the batch size"),
        (
            f"{ranks} processes, no messages",
            parts["together"],
            "upper limit for DDP, including contention",
        ),
        (f"{ranks} processes, DDP", ddp, f"{exposed:.1f} % of the step waits for the all-reduce"),
    )
    lines = [
        f"{part:30} {1000 * time:8.1f} ms per step {whole / time:5.2f} x  {note}".rstrip() for part, time, note in rows
    ]
    return "\n".join([*lines, f"{f'all-reduce of {megabytes:.1f} MB':30} {1000 * parts['reduce']:8.1f} ms"])
