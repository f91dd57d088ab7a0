"""Measures the overhead of the trainer by running its epochs in turns with epochs of a bare training loop."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from train.bench.parts import train_step
from train.bench.ranks import measure_in_turns
from train.engine import train_epoch
from train.errors import UserError
from train.job import build_optimizer, load, make_model, prepare
from train.methods import METHODS
from train.schedule import Position
from train.settings import DEFAULT

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from train.launch import RankContext
    from train.settings import Settings

Loader = DataLoader[tuple[torch.Tensor, ...]]

# Settings that the bare loop does not support.
UNSUPPORTED = (
    *("amp", "accumulate", "grad_clip", "ema", "keep_last", "join", "compile", "channels_last"),
    *("fault", "workers", "monitor", "save_every", "checkpoint_every", "resume"),
)


def check_settings(settings: Settings, ctx: RankContext) -> None:
    """Refuse settings for which the two loops would do different work. Raises the same UserError on all ranks."""
    for name in UNSUPPORTED:
        if getattr(settings, name) != getattr(DEFAULT, name):
            raise UserError(f"--overhead: not with --{name.replace('_', '-')}, which the bare loop does not support")
    if settings.batch_size % ctx.world_size:
        raise UserError(
            f"--overhead: --batch-size {settings.batch_size} must be a multiple of the {ctx.world_size} ranks, because "
            "the bare loop needs equal shares"
        )


def build_loader(samples: Dataset[tuple[torch.Tensor, ...]], batch_size: int, ctx: RankContext) -> Loader:
    """Build the loader of the bare loop. batch_size: global batch size."""
    sampler: Sampler[int] = DistributedSampler(samples, ctx.world_size, ctx.rank)
    # Index the data set with whole batches, which is as fast as in the trainer.
    batches = BatchSampler(sampler, batch_size // ctx.world_size, drop_last=True)
    return DataLoader(samples, sampler=batches, batch_size=None)


def train_bare_epoch(forward: nn.Module, optimizer: Optimizer, loader: Loader, device: torch.device) -> None:
    """Train one epoch without metrics, progress or checkpoints."""
    for x, y in loader:
        train_step(forward, optimizer, x.to(device), y.to(device))


def measure_overhead(settings: Settings, ctx: RankContext, rounds: int) -> dict[str, Any]:
    """Time epochs of both loops in turns, `rounds` pairs after a pair for warm-up; a collective.

    Both loops use the same model, method, data and batch size. Only the work around the step differs: the schedule, the
    exact sums of loss and accuracy, and the hooks for saving and checks. Returns the steps of an epoch, the ratio of
    each pair, the median ratio, and seconds per step of the slowest rank.
    """
    check_settings(settings, ctx)
    # The plan has as many epochs as are timed, because after its last step the trainer would do nothing.
    settings = replace(settings, epochs=rounds + 1, max_steps=None)
    job = prepare(settings, ctx)
    data = load(settings, ctx)
    method = METHODS[settings.method](settings, ctx)
    forward = method.wrap(make_model(settings, data))
    forward.train()
    optimizer = build_optimizer(settings, method)
    loader = build_loader(data.train, settings.batch_size, ctx)
    # DistributedSampler pads the epoch, so the bare loop may have one more step than the trainer.
    steps = {"trainer": job.plan.steps_per_epoch, "bare": len(loader)}
    position = Position(ctx.device)

    def run_trainer() -> None:
        train_epoch(job, position)
        job.upkeep.logbook.end_epoch(position)
        position.next_epoch()

    def run_bare() -> None:
        train_bare_epoch(forward, optimizer, loader, ctx.device)

    measured = measure_in_turns({"trainer": run_trainer, "bare": run_bare}, ctx, rounds)
    times = {name: [seconds / steps[name] for seconds in measured[name]] for name in measured}
    ratios = [trainer / bare for trainer, bare in zip(times["trainer"], times["bare"], strict=True)]
    return {
        "steps": steps["trainer"],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **{f"{name}_s": seconds for name, seconds in times.items()},
    }
