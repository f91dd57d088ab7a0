"""The one training loop, the same for every method."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from train.checkpoints.lock import RunLock
from train.errors import Stopped, UserError
from train.job import Job, prepare
from train.recorders.logbook import Logbook
from train.schedule import set_learning_rate
from train.scoring import evaluate

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext
    from train.metrics import Score
    from train.position import Position
    from train.recorders.base import Recorder
    from train.settings import Settings
    from train.stopping import StopSignals


@dataclass(frozen=True)
class Result:
    """What a run achieved.

    seconds: from the first step to the last evaluation. trained: over the last epoch. saved: the files of all
    ranks. replaced: files of an earlier run of the same name that are gone. diverged: the epoch since which the loss is
    infinite or NaN; None where it is a number in the end. failed: which saves on the way have failed, as a sentence;
    empty if none. replicas: of the model, over all ranks.
    """

    run: str
    epochs: int
    steps: int
    seconds: float
    trained: Score
    test: Score
    saved: tuple[Path, ...]
    replaced: int
    diverged: int | None = None
    failed: str = ""
    replicas: int = 1


def train(settings: Settings, ctx: RankContext, recorder: Recorder, signals: StopSignals | None = None) -> Result:
    """Train one model as the settings say, save what they ask for, and check it if they ask for that.

    To be called on every rank, inside the process group if the method needs one. Bitwise reproducible with
    the same settings, number of ranks, libraries and machine. signals: the signals of this process, which then stop the
    run after a step; None for none. Raises UserError, Stopped, and what the checks raise, on all ranks alike.
    """
    with RunLock(settings, ctx) as lock:
        return run_job(prepare(settings, ctx, recorder.console, signals, lock), recorder)


def run_job(job: Job, recorder: Recorder) -> Result:
    """Train until the plan ends. Raises as `train` does."""
    settings, ctx = job.settings, job.ctx
    job.stopping.begin()
    position = job.keeper.position
    logbook = Logbook(job, recorder, position)
    logbook.start(position.step if job.keeper.resumed else None)
    start, diverged = time.perf_counter(), None
    with job.watch:
        while True:
            train_epoch(job, position, logbook)
            trained = position.meter.over_ranks(ctx)
            logbook.end_epoch(position)
            test = evaluate_epoch(job, position, logbook, trained)
            if math.isfinite(trained.loss) and (test is None or math.isfinite(test.loss)):
                diverged = None  # or again: of one overflow, as with --amp fp16, a run recovers
            else:
                diverged = diverged or position.epoch
            if position.step == job.plan.steps:
                break
            stop_if_asked(job, position, now=True)
            position.next_epoch()
    assert test is not None  # the last epoch is always evaluated
    seconds = time.perf_counter() - start
    recorder.end(seconds)
    return Result(
        run=settings.run,
        epochs=position.epoch,
        steps=position.step,
        seconds=seconds,
        trained=trained,
        test=test,
        saved=tuple(job.saver.saved),
        replaced=job.saver.replaced,
        diverged=diverged,
        failed=job.saver.attempts.failed,
        replicas=job.saver.replicas,
    )


def evaluate_epoch(job: Job, position: Position, logbook: Logbook, trained: Score) -> Score | None:
    """Score the model after an epoch, if it is due, and keep it if it is the best so far; a collective.

    trained: over the epoch. The evaluation changes nothing of the model: what is saved after it is what the last step
    left.
    """
    start, test, best = time.perf_counter(), None, False
    if position.step == job.plan.steps or position.epoch % job.settings.eval_every == 0:
        test = evaluate(job.method.module, job.test_batches, job.ctx)
        best = job.best.update(test, position.epoch, position.step)
    logbook.after_epoch(position, trained, test, time.perf_counter() - start, best)
    if best:
        logbook.saved(job.saver.save_best(position.step))
    return test


def train_epoch(job: Job, position: Position, logbook: Logbook) -> None:
    """Train on every global batch of this epoch that is left, or until the plan ends; moves `position` on.

    A run that was resumed may begin within an epoch: the steps that it has made already are left out.
    """
    join, trainer = job.settings.join, job.trainer
    steps = min(job.sampler.longest - position.in_epoch, job.plan.steps - position.step)
    end = position.step + steps
    # The epoch decides the order of the samples and how each is augmented. Both count epochs from 0, as torch does.
    job.sampler.set_epoch(position.epoch - 1, position.in_epoch)
    job.train_samples.set_epoch(position.epoch - 1)
    trainer.forward.train()  # dropout drops, and BatchNorm takes the statistics of the batch
    logbook.begin_epoch()
    sizes = islice(job.sampler.sizes, position.in_epoch, position.in_epoch + steps)
    # Not strict: the loader may have more batches than --max-steps leaves.
    batches = zip(sizes, logbook.waited_for(job.train_batches), strict=False)
    with job.method.join_ranks(trainer.optimizer) if join else nullcontext():
        for samples, (x, y) in batches:  # samples: of the global batch. x, y: this rank's share of it
            lr = job.rate.at(position.step)
            set_learning_rate(trainer.optimizer, lr)
            position.step += 1
            position.in_epoch += 1
            trainer.run(position.step, x, y, samples, position.meter)
            if not join:
                check_and_save(job, position, logbook)
            logbook.after_step(position, lr, samples)
            stop_if_asked(job, position)
    if join:
        # A rank that ran out of batches earlier counts the others' last steps too: from here all are at one step.
        position.in_epoch += end - position.step
        position.step = end
        set_learning_rate(trainer.optimizer, job.rate.at(end - 1))
        check_and_save(job, position, logbook)


def check_and_save(job: Job, position: Position, logbook: Logbook) -> None:
    """Do what is due after an optimizer step: --monitor, --save-every, --checkpoint-every; a collective.

    Before any other forward: in training mode it would update BatchNorm's statistics, and through DDP's wrapper it
    would replace them by rank 0's. Checked first, so that what is saved is what was found to be right, or was repaired.
    """
    step = position.step
    logbook.warned(job.watch.after_step(step, last=step == job.plan.steps))
    logbook.saved(job.saver.after_step(step))
    job.keeper.after_step(position)


def stop_if_asked(job: Job, position: Position, *, now: bool = False) -> None:
    """Save and leave if any rank was asked to by a signal; a collective when it is due. Raises Stopped on all ranks.

    now: agree now, as after an evaluation, which takes long; else at steps that all ranks know. After the last step
    there is nothing to stop: what is left is to score the model.
    """
    if position.step == job.plan.steps or not (number := job.stopping.agree_on_signal(position.step, now=now)):
        return
    if job.settings.checkpoint_every is None:
        raise Stopped(number, position.step, "nothing was saved: --checkpoint-every N keeps what --resume needs")
    try:
        job.keeper.after_step(position, now=True)
    except UserError as error:
        raise Stopped(number, position.step, f"its state is not saved: {error}") from error
    raise Stopped(number, position.step, "its state is saved: add --resume to go on")
