"""The training loop, equal for all methods: build the objects of a run, train its epochs, and save what is due."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import torch

from train import parts
from train.checkpoints.lock import RunLock
from train.checkpoints.saver import Saver
from train.data.loading import Loaders
from train.errors import Stopped, UserError
from train.faults import make_fault
from train.faults.faulty_trainer import FaultyTrainer
from train.launch.signals import SignalAgreement
from train.methods import METHODS
from train.metrics import Best, evaluate
from train.recorders.base import Recorder
from train.recorders.metrics_logger import MetricsLogger
from train.result import Result
from train.resume import StateSaver
from train.schedule import LearningRate, Position, set_learning_rate
from train.seeds import seed_rank
from train.sync_checks import SyncChecks
from train.trainer import Trainer

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.launch.signals import Signals
    from train.metrics import Score
    from train.settings import Settings


class Job:
    """Builds the objects of one run, from the data to the files; a collective.

    ctx: with the mesh of the method, as `assign_mesh` returns it. recorder: by default one that records nothing.
    signals: of this process. lock: the lock to acquire on --out, if any. position: the start of the run, or the
    restored position of --resume. best: the epoch with the best test score so far. Raises UserError.
    """

    def __init__(
        self,
        settings: Settings,
        ctx: RankContext,
        recorder: Recorder | None = None,
        signals: Signals | None = None,
        lock: RunLock | None = None,
    ) -> None:
        self.settings, self.ctx = settings, ctx
        self.recorder = recorder or Recorder()
        parts.check_agreement(settings, ctx)
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark
        torch.manual_seed(settings.seed)  # equal on all ranks, so that all ranks build equal models
        data = parts.load(settings, ctx)
        self.method = method = METHODS[settings.method](settings, ctx)
        sampler = parts.make_sampler(settings, ctx, len(data.train), method.replicas)
        self.plan = plan = parts.make_plan(settings, len(data.train), sampler.longest)
        fault = make_fault(settings, ctx, plan.steps)
        fault.build_model = partial(parts.make_model, settings, data)
        model = fault.build_model()
        method.parameters = sum(p.numel() for p in model.parameters())  # before a method removes parts of other ranks
        parts.check_model(model, sampler, plan, settings, ctx, method.replicas)
        # The module that training calls. The method may wrap the model, and an injected fault may change it.
        wrapped = fault.after_wrap(method, method.wrap(model))
        if settings.compile:
            wrapped = parts.compile_model(wrapped, ctx)
        # After wrapping, because a method may replace the parameters.
        optimizer = parts.build_optimizer(settings, method)
        # From here on each rank has a separate random stream.
        seed_rank(settings.seed, ctx)
        kind = Trainer if settings.fault is None else FaultyTrainer
        self.trainer = trainer = kind(settings, ctx, method, wrapped, optimizer, fault)
        self.rate = LearningRate(settings, plan, ctx.mesh.data_size * method.replicas)
        self.loaders = Loaders.build(data, fault.change_sampler(sampler), ctx, settings.workers)
        if lock is None:
            lock = RunLock(settings, ctx)
        else:
            lock.acquire()
        self.best = Best()
        self.saver = Saver(trainer, plan, lock)
        self.state_saver = StateSaver(trainer, plan, self.saver, self.best)
        self.position = Position(ctx.device, trainer.task)
        if settings.resume:
            self.position = self.state_saver.restore(self.loaders.dataset)
        self.metrics_logger = MetricsLogger(trainer, plan, self.rate, sampler.samples, self.recorder)
        # With --join, ranks make different numbers of steps, and agree only after an epoch.
        self.signals = SignalAgreement(ctx, signals, between=not settings.join)
        self.sync_checks = SyncChecks(trainer, self.recorder.console) if settings.monitor else None


def train(settings: Settings, ctx: RankContext, recorder: Recorder, signals: Signals | None = None) -> Result:
    """Train one model.

    Call it on every rank, within the process group if the method needs one. Bitwise reproducible with equal settings,
    number of ranks, libraries and machine. signals: signals of this process that stop the run after a step; None
    disables stopping. Raises UserError, Stopped, and the errors of --monitor, on all ranks.
    """
    with RunLock(settings, ctx) as lock:
        return run_job(Job(settings, ctx, recorder, signals, lock))


def run_job(job: Job) -> Result:
    """Train until the plan ends. Raises the same errors as `train`."""
    position = job.position
    diverged: int | None = None
    job.signals.begin()
    job.metrics_logger.start(position.step if job.state_saver.resumed else None)
    start = time.perf_counter()
    with job.sync_checks.monitor if job.sync_checks else nullcontext():
        while True:
            train_epoch(job, position)
            trained, test = score_epoch(job, position)
            if math.isfinite(trained.loss) and (test is None or math.isfinite(test.loss)):
                # A run recovers from a single overflow, as with --amp fp16.
                diverged = None
            else:
                diverged = diverged or position.epoch
            # An evaluation may take long, so the ranks agree on a signal now.
            stop_if_signaled(job, position, now=True)
            if position.step == job.plan.steps:
                break
            position.next_epoch()
    # The last epoch is always evaluated.
    assert test is not None
    return Result(
        run=job.plan.run,
        epochs=position.epoch,
        steps=position.step,
        seconds=time.perf_counter() - start,
        trained=trained,
        test=test,
        saved=tuple(job.saver.saved),
        replaced=job.saver.replaced,
        diverged=diverged,
        failed=job.saver.failed,
        replicas=job.saver.replicas,
    )


def train_epoch(job: Job, position: Position) -> None:
    """Train on the remaining global batches of this epoch, or until the plan ends; advances `position`.

    A resumed run may begin within an epoch.
    """
    join, trainer, sampler = job.settings.join, job.trainer, job.loaders.sampler
    steps = min(sampler.longest - position.in_epoch, job.plan.steps - position.step)
    end = position.step + steps
    # The epoch determines the order and augmentation of samples. Both count epochs from 0, as in torch.
    sampler.set_epoch(position.epoch - 1, position.in_epoch)
    job.loaders.dataset.set_epoch(position.epoch - 1)
    trainer.wrapped.train()
    job.metrics_logger.begin_epoch()
    sizes = islice(sampler.sizes, position.in_epoch, position.in_epoch + steps)
    # Not strict: the loader may have more batches than --max-steps allows.
    batches = zip(sizes, job.metrics_logger.time_batches(job.loaders.train_batches), strict=False)
    with job.method.join_ranks(trainer.optimizer) if join else nullcontext():
        for size, (x, y) in batches:  # size: of the global batch. x, y: this rank's share
            lr = job.rate.at(position.step)
            set_learning_rate(trainer.optimizer, lr)
            position.step += 1
            position.in_epoch += 1
            trainer.run(position.step, x, y, size, position.metric_sums)
            if not join:
                check_and_save(job, position)
            job.metrics_logger.after_step(position, lr, size)
            stop_if_signaled(job, position)
    if join:
        end_joined_epoch(job, position, end)


def end_joined_epoch(job: Job, position: Position, end: int) -> None:
    """Check and save what is due in an epoch of --join, after its last step, `end`; a collective.

    A rank that ran out of batches early counts the last steps too: from here on all ranks are at the same step.
    """
    position.in_epoch += end - position.step
    position.step = end
    set_learning_rate(job.trainer.optimizer, job.rate.at(end - 1))
    check_and_save(job, position)


def check_and_save(job: Job, position: Position) -> None:
    """Run the actions of --monitor, --save-every and --checkpoint-every that are due after a step; a collective.

    They come before any other forward, which would update BatchNorm's statistics in training mode and broadcast
    rank 0's through DDP's wrapper. The check comes first, so that the saved state has been checked or repaired.
    """
    settings, step = job.settings, position.step
    if job.sync_checks and (warning := job.sync_checks.after_step(step, last=step == job.plan.steps)):
        job.recorder.note(f"warning: {warning}")
    if settings.save_per_rank:
        for path in job.saver.after_step(step):
            job.recorder.note(f"saved {path}")
    if settings.checkpoint_every:
        job.state_saver.after_step(position)


def score_epoch(job: Job, position: Position) -> tuple[Score, Score | None]:
    """Score the epoch, and the model if an evaluation is due; save the best model; a collective.

    Returns the scores of training and of the test set. The evaluation does not change the model.
    """
    trained = position.metric_sums.over_ranks(job.ctx)
    job.metrics_logger.read_clock()
    start, test, best = time.perf_counter(), None, False
    if position.step == job.plan.steps or position.epoch % job.settings.eval_every == 0:
        test = evaluate(job.method, job.loaders.test_batches, job.ctx, job.trainer.task)
        best = job.best.update(test, position.epoch, position.step)
    job.metrics_logger.after_epoch(position, trained, test, time.perf_counter() - start, best)
    if best and job.settings.save_best:
        for path in job.saver.save_best(position.step):
            job.recorder.note(f"saved {path}")
    return trained, test


def stop_if_signaled(job: Job, position: Position, *, now: bool = False) -> None:
    """Save a state and stop if any rank received a signal; a collective when due. Raises Stopped on all ranks.

    now: agree now, otherwise only at common steps. After the last step the run ends anyway.
    """
    if position.step == job.plan.steps or not (number := job.signals.agree_on_signal(position.step, now=now)):
        return
    if job.settings.checkpoint_every is None:
        advice = "nothing was saved; use --checkpoint-every N to save states for --resume"
        raise Stopped(number, position.step, advice)
    try:
        job.state_saver.save_now(position)
    except UserError as error:
        raise Stopped(number, position.step, f"its state is not saved: {error}") from error
    raise Stopped(number, position.step, "its state is saved; add --resume to continue")
