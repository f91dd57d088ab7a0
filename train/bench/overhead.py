"""What the trainer costs beside the training itself: an epoch of it against an epoch of a bare loop, in turns."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from train.bench import bare
from train.bench.ranks import seconds
from train.engine import train_epoch
from train.errors import UserError
from train.job import build_optimizer, load, make_model, prepare
from train.methods import METHODS
from train.position import Position
from train.recorders.base import Recorder
from train.recorders.logbook import Logbook
from train.settings import DEFAULT

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings


# What the bare loop does not do, so that the two would not do the same work.
UNLIKE = (
    *("amp", "accumulate", "grad_clip", "ema", "keep_last", "join", "compile", "channels_last"),
    *("fault", "workers", "monitor", "save_every", "checkpoint_every", "resume"),
)


def check(settings: Settings, ctx: RankContext) -> None:
    """Refuse what would not be the same work in both loops; equal on all ranks. Raises UserError."""
    for name in UNLIKE:
        if getattr(settings, name) != getattr(DEFAULT, name):
            raise UserError(f"--overhead: not with --{name.replace('_', '-')}: the bare loop has none of it")
    if settings.batch_size % ctx.world_size:
        raise UserError(
            f"--overhead: --batch-size {settings.batch_size} does not divide over {ctx.world_size} ranks, and the bare "
            "loop needs equal shares"
        )


def overhead(settings: Settings, ctx: RankContext, rounds: int) -> dict[str, Any]:
    """Time both, one after the other, `rounds` times after one that warms up; a collective.

    Same model, same method, same data and batch size, so that only what stands around the step differs: the schedule,
    exact sums of loss and accuracy, the hooks of saving and checks. Returns the steps of an epoch, the ratios of the
    pairs, their median, and seconds a step of the slowest rank.
    """
    check(settings, ctx)
    # As many epochs as are timed: past the plan's last step the trainer has nothing to do, and takes no time for it.
    settings = replace(settings, epochs=rounds + 1, max_steps=None)
    job = prepare(settings, ctx)
    data = load(settings, ctx)
    method = METHODS[settings.method](settings, ctx)
    forward = method.wrap(make_model(settings, data))
    forward.train()
    optimizer = build_optimizer(settings, method)
    loader = bare.batches(data.train, settings.batch_size, ctx)
    # The bare loop fills up the last batch, where the trainer leaves it out: it may make one step more.
    steps = {"trainer": job.plan.steps_per_epoch, "bare": len(loader)}
    position = Position(ctx.device)
    logbook = Logbook(job, Recorder(), position)

    def trainer() -> None:
        train_epoch(job, position, logbook)
        logbook.end_epoch(position)
        position.next_epoch()

    loops = {"trainer": trainer, "bare": lambda: bare.epoch(forward, optimizer, loader, ctx.device)}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(rounds + 1):
        for name in sorted(loops, reverse=turn % 2 == 0):
            ctx.gather(None)  # all ranks begin together
            slowest = max(ctx.gather(seconds(loops[name], ctx.device)))
            if turn:
                times[name].append(slowest / steps[name])
    ratios = [mine / theirs for mine, theirs in zip(times["trainer"], times["bare"], strict=True)]
    return {
        "steps": steps["trainer"],
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **{f"{n}_s": t for n, t in times.items()},
    }
