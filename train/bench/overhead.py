"""What the trainer costs beside the training itself: an epoch of it against an epoch of a bare loop, in turns."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from train.bench import bare
from train.bench.ranks import seconds
from train.engine import Position, train_epoch
from train.job import build_optimizer, load, make_model, prepare
from train.logbook import Logbook
from train.methods import METHODS
from train.recorders.base import Recorder

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.settings import Settings


def overhead(settings: Settings, ctx: RankContext, rounds: int) -> dict[str, Any]:
    """Time both, one after the other, `rounds` times after one that warms up; a collective.

    Same model, same method, same data and batch size, so that only what stands around the step differs: the schedule,
    exact sums of loss and accuracy, the hooks of saving and checks. Returns the steps of an epoch, the ratios of the
    pairs, their median, and seconds a step of the slowest rank.
    """
    job = prepare(settings, ctx)
    data = load(settings, ctx)
    method = METHODS[settings.method](settings, ctx)
    forward = method.wrap(make_model(settings, data))
    forward.train()
    optimizer = build_optimizer(settings, method)
    loader = bare.batches(data.train, settings.batch_size, ctx)
    steps = job.plan.steps_per_epoch
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
                times[name].append(slowest / steps)
    ratios = [mine / theirs for mine, theirs in zip(times["trainer"], times["bare"], strict=True)]
    return {
        "steps": steps,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        **{f"{n}_s": t for n, t in times.items()},
    }
