"""The one training loop, the same for every method."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from train.job import Job, prepare
from train.position import Position
from train.schedule import schedule, set_learning_rate
from train.scoring import evaluate

__all__ = ["Position", "Result", "train", "train_epoch"]

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext
    from train.metrics import Score
    from train.progress import Silent
    from train.settings import Settings


@dataclass(frozen=True)
class Result:
    """What a run achieved.

    seconds: from the first step to the last evaluation. trained: over the last epoch. saved: the files of all
    ranks. replaced: files of an earlier run of the same name that are gone.
    """

    run: str
    epochs: int
    steps: int
    seconds: float
    trained: Score
    test: Score
    saved: tuple[Path, ...]
    replaced: int


def train(settings: Settings, ctx: RankContext, progress: Silent) -> Result:
    """Train one model as the settings say, save what they ask for, and check it if they ask for that.

    To be called on every rank, inside the process group if the method needs one. Bitwise reproducible with
    the same settings, number of ranks, libraries and machine. Raises UserError, and what the checks raise, on all ranks
    alike.
    """
    job = prepare(settings, ctx, progress.console)
    progress.start(job.plan)
    start, position = time.perf_counter(), job.keeper.position
    with job.watch:
        while True:
            epoch_start = time.perf_counter()
            train_epoch(job, position, progress)
            elapsed = time.perf_counter() - epoch_start
            trained, test = position.meter.over_ranks(ctx), evaluate(job.method.module, job.test_batches, ctx)
            progress.epoch(position.step, position.epoch, trained, test, trained.samples / elapsed)
            if position.step == job.plan.steps:
                break
            position.next_epoch()
    seconds = time.perf_counter() - start
    epochs, saver = position.epoch, job.saver
    return Result(settings.run, epochs, position.step, seconds, trained, test, tuple(saver.saved), saver.replaced)


def train_epoch(job: Job, position: Position, progress: Silent) -> None:
    """Train on every global batch of this epoch that is left, or until the plan ends; moves `position` on."""
    steps, start, seen = job.plan.steps, time.perf_counter(), 0
    join, optimizer = job.settings.join, job.step.optimizer
    left = min(job.sampler.longest - position.in_epoch, steps - position.step)
    job.sampler.set_epoch(position.epoch - 1, position.in_epoch)
    job.step.forward.train()
    sizes = islice(job.sampler.sizes, position.in_epoch, position.in_epoch + left)
    batches = zip(sizes, job.train_batches, strict=False)
    job.keeper.restore_random()
    with job.method.joined(optimizer) if join else nullcontext():
        for samples, (x, y) in batches:
            set_learning_rate(optimizer, job.settings.lr * schedule(position.step, steps))
            position.step += 1
            position.in_epoch += 1
            left -= 1
            job.step.run(position.step, x, y, samples, position.meter)
            if not join:
                check_and_save(job, position)
            seen += samples
            progress.step(position.step, position.epoch, position.meter, seen / (time.perf_counter() - start))
    if join:
        # On a rank that was done earlier the others' last steps count too.
        position.step += left
        position.in_epoch += left
        set_learning_rate(optimizer, job.settings.lr * schedule(position.step - 1, steps))
        check_and_save(job, position)


def check_and_save(job: Job, position: Position) -> None:
    """Do what is due after an optimizer step; a collective.

    At once: no later forward may touch the buffers before. Checked first, so that what is saved is what was found to be
    right, or was repaired.
    """
    step = position.step
    job.watch.after_step(step, last=step == job.plan.steps)
    job.saver.after_step(step)
    job.keeper.after_step(position)
