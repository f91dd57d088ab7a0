"""The training loop, equal for all methods."""

from __future__ import annotations

import time
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

from train.checkpoints.lock import RunLock
from train.job import Job, prepare
from train.schedule import set_learning_rate

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.launch.signals import Signals
    from train.recorders.base import Recorder
    from train.schedule import Position
    from train.settings import Settings
    from train.upkeep import Result


def train(settings: Settings, ctx: RankContext, recorder: Recorder, signals: Signals | None = None) -> Result:
    """Train one model.

    Call it on every rank, within the process group if the method needs one. Bitwise reproducible with equal settings,
    number of ranks, libraries and machine. signals: signals of this process that stop the run after a step; None
    disables stopping. Raises UserError, Stopped, and the errors of --monitor, on all ranks.
    """
    with RunLock(settings, ctx) as lock:
        return run_job(prepare(settings, ctx, recorder, signals, lock))


def run_job(job: Job) -> Result:
    """Train until the plan ends. Raises the same errors as `train`."""
    upkeep, position = job.upkeep, job.upkeep.position
    upkeep.start()
    start = time.perf_counter()
    with upkeep.watch.monitor or nullcontext():
        while True:
            train_epoch(job, position)
            upkeep.after_epoch(position)
            if position.step == job.plan.steps:
                break
            position.next_epoch()
    return upkeep.finish(position, time.perf_counter() - start)


def train_epoch(job: Job, position: Position) -> None:
    """Train on the remaining global batches of this epoch, or until the plan ends; advances `position`.

    A resumed run may begin within an epoch.
    """
    join, trainer, sampler = job.settings.join, job.trainer, job.loaders.sampler
    steps = min(sampler.longest - position.in_epoch, job.plan.steps - position.step)
    end = position.step + steps
    # The epoch determines the order and augmentation of samples. Both count epochs from 0, as in torch.
    sampler.set_epoch(position.epoch - 1, position.in_epoch)
    job.loaders.samples.set_epoch(position.epoch - 1)
    trainer.forward.train()
    sizes = islice(sampler.sizes, position.in_epoch, position.in_epoch + steps)
    # Not strict: the loader may have more batches than --max-steps allows.
    batches = zip(sizes, job.upkeep.begin_epoch(job.loaders.train), strict=False)
    with job.method.join_ranks(trainer.optimizer) if join else nullcontext():
        for samples, (x, y) in batches:  # samples: size of the global batch. x, y: this rank's share
            lr = job.rate.at(position.step)
            set_learning_rate(trainer.optimizer, lr)
            position.step += 1
            position.in_epoch += 1
            trainer.run(position.step, x, y, samples, position.meter)
            job.upkeep.after_step(position, lr, samples)
    if join:
        # A rank that ran out of batches early counts the last steps too: from here on all ranks are at the same step.
        position.in_epoch += end - position.step
        position.step = end
        set_learning_rate(trainer.optimizer, job.rate.at(end - 1))
        job.upkeep.check_and_save(position)
