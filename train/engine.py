"""The training loop, equal for all methods."""

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
from train.metrics import evaluate
from train.recorders.logbook import Logbook
from train.schedule import set_learning_rate

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext
    from train.launch.signals import Signals
    from train.metrics import Score
    from train.recorders.base import Recorder
    from train.schedule import Position
    from train.settings import Settings


@dataclass(frozen=True)
class Result:
    """The result of a run.

    seconds: from the first step to the last evaluation. trained: score over the last epoch. saved: files of all ranks.
    replaced: number of removed files of an earlier run. diverged: the epoch since which the loss is not finite; None if
    the loss is finite at the end. failed: failed periodic saves as a sentence, or empty. replicas: of the model, over
    all ranks.
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


def train(settings: Settings, ctx: RankContext, recorder: Recorder, signals: Signals | None = None) -> Result:
    """Train one model.

    Call it on every rank, within the process group if the method needs one. Bitwise reproducible with equal settings,
    number of ranks, libraries and machine. signals: signals of this process that stop the run after a step; None
    disables stopping. Raises UserError, Stopped, and the errors of --monitor, on all ranks.
    """
    with RunLock(settings, ctx) as lock:
        return run_job(prepare(settings, ctx, recorder.console, signals, lock), recorder)


def run_job(job: Job, recorder: Recorder) -> Result:
    """Train until the plan ends. Raises the same errors as `train`."""
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
                diverged = None  # a run recovers from a single overflow, as with --amp fp16
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
    """Score the model after an epoch, if due, and save it if it is the best so far; a collective.

    trained: score over the epoch. The evaluation does not change the model.
    """
    start, test, best = time.perf_counter(), None, False
    if position.step == job.plan.steps or position.epoch % job.settings.eval_every == 0:
        test = evaluate(job.method, job.test_batches, job.ctx)
        best = job.best.update(test, position.epoch, position.step)
    logbook.after_epoch(position, trained, test, time.perf_counter() - start, best)
    if best:
        logbook.record_saved_files(job.saver.save_best(position.step))
    return test


def train_epoch(job: Job, position: Position, logbook: Logbook) -> None:
    """Train on the remaining global batches of this epoch, or until the plan ends; advances `position`.

    A resumed run may begin within an epoch.
    """
    join, trainer = job.settings.join, job.trainer
    steps = min(job.sampler.longest - position.in_epoch, job.plan.steps - position.step)
    end = position.step + steps
    # The epoch determines the order and augmentation of samples. Both count epochs from 0, as in torch.
    job.sampler.set_epoch(position.epoch - 1, position.in_epoch)
    job.train_samples.set_epoch(position.epoch - 1)
    trainer.forward.train()
    logbook.begin_epoch()
    sizes = islice(job.sampler.sizes, position.in_epoch, position.in_epoch + steps)
    # Not strict: the loader may have more batches than --max-steps allows.
    batches = zip(sizes, logbook.time_batches(job.train_batches), strict=False)
    with job.method.join_ranks(trainer.optimizer) if join else nullcontext():
        for samples, (x, y) in batches:  # samples: size of the global batch. x, y: this rank's share
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
        # A rank that ran out of batches early counts the last steps too: from here on all ranks are at the same step.
        position.in_epoch += end - position.step
        position.step = end
        set_learning_rate(trainer.optimizer, job.rate.at(end - 1))
        check_and_save(job, position, logbook)


def check_and_save(job: Job, position: Position, logbook: Logbook) -> None:
    """Run the actions due after an optimizer step: --monitor, --save-every, --checkpoint-every; a collective.

    They come before any other forward, which would update BatchNorm's statistics in training mode and broadcast rank
    0's through DDP's wrapper. The check comes first, so that the saved state has been checked or repaired.
    """
    step = position.step
    logbook.record_warning(job.watch.after_step(step, last=step == job.plan.steps))
    logbook.record_saved_files(job.saver.after_step(step))
    job.keeper.after_step(position)


def stop_if_asked(job: Job, position: Position, *, now: bool = False) -> None:
    """Save a state and stop if any rank received a signal; a collective when due. Raises Stopped on all ranks.

    now: agree now, after a long evaluation; otherwise only at common steps. After the last step the run ends anyway.
    """
    if position.step == job.plan.steps or not (number := job.stopping.agree_on_signal(position.step, now=now)):
        return
    if job.settings.checkpoint_every is None:
        raise Stopped(number, position.step, "nothing was saved; use --checkpoint-every N to save states for --resume")
    try:
        job.keeper.after_step(position, now=True)
    except UserError as error:
        raise Stopped(number, position.step, f"its state is not saved: {error}") from error
    raise Stopped(number, position.step, "its state is saved; add --resume to continue")
