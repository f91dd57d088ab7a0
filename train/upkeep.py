"""The work around optimizer steps: checks, checkpoints, states, signals and records."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.checkpoints.saver import Saver
from train.errors import Stopped, UserError
from train.launch.signals import Stopping
from train.metrics import Best, evaluate
from train.optional import SyncMonitor, metadata
from train.recorders.logbook import Logbook
from train.resume import Keeper

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import Console
    from torch import Tensor

    from train.checkpoints.lock import RunLock
    from train.data.loading import Loaders
    from train.launch.signals import Signals
    from train.metrics import Score
    from train.recorders.base import Recorder
    from train.schedule import LearningRate, Plan, Position
    from train.step import Step


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


class Watch:
    """Calls a SyncMonitor after every optimizer step, with --monitor.

    console: output of the checks on rank 0, by default stderr.
    """

    def __init__(self, trainer: Step, console: Console | None = None) -> None:
        self.settings, self.trainer = trainer.settings, trainer
        # Further contents of a checkpoint, under the same keys.
        self.extras: dict[str, Any] = {}
        self.monitor: SyncMonitor | None = None
        if self.settings.monitor:
            method, scaler = trainer.method, trainer.scaler
            (replica,) = method.state(trainer.optimizer)
            self.monitor = SyncMonitor(
                (method.monitored, self.extras),
                replica.optimizer,
                scaler if scaler.is_enabled() else None,
                every=self.settings.monitor,
                on_desync=self.settings.on_desync or "warn",
                console=console,
            )

    def after_step(self, step: int, *, last: bool) -> str:
        """Check if it is due after this step, counted from 1, or if it is the last step; a collective in that case.

        Returns the findings in a few words for a log, or an empty string.
        """
        if self.monitor is None:
            return ""
        # Metadata that may change between steps, for example the last average of localsgd. The block is equal on all
        # ranks, because the monitor knows the ranks.
        facts = self.trainer.method.metadata_fields
        if (averages := self.trainer.averages) is not None:
            self.extras["ema"] = averages
        self.extras["syncheck"] = metadata(run=self.settings.run, rank=0, world_size=1, step=step, **facts)
        before = self.monitor.checks
        self.monitor.step(step)
        if last:
            self.monitor.close()
        report = self.monitor.last if self.monitor.checks > before else None
        if report is None or report.verdict != "out_of_sync":
            return ""
        codes = sorted({finding.code for group in report.groups for finding in group.findings})
        return f"step {step}: the ranks are out of sync: {', '.join(codes)}"


class Upkeep:
    """Calls everything that is due after a step or an epoch, in the same order on all ranks.

    position: the start of the run, after the restored state with --resume. trained, test: the last scores. diverged:
    the epoch since which the loss is not finite, or None.
    """

    def __init__(
        self,
        trainer: Step,
        plan: Plan,
        rate: LearningRate,
        loaders: Loaders,
        recorder: Recorder,
        signals: Signals | None,
        lock: RunLock,
    ) -> None:
        self.trainer, self.plan, self.loaders, self.recorder = trainer, plan, loaders, recorder
        self.settings, self.ctx = trainer.settings, trainer.ctx
        self.saver, self.best = Saver(trainer, plan, lock), Best()
        self.keeper = Keeper(trainer, plan, self.saver, loaders.samples, self.best)
        self.position = self.keeper.position
        self.stopping = Stopping(self.ctx, signals, between=not self.settings.join)
        self.watch = Watch(trainer, recorder.console)
        self.logbook = Logbook(trainer, plan, rate, loaders.sampler.samples, recorder)
        self.trained: Score | None = None
        self.test: Score | None = None
        self.diverged: int | None = None

    def start(self) -> None:
        """Start the records and the watch for signals. Raises UserError if a log file cannot be written."""
        self.stopping.begin()
        self.logbook.start(self.position.step if self.keeper.resumed else None)

    def begin_epoch(self, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Start the clock of an epoch. Returns the batches; waiting for them is timed."""
        self.logbook.begin_epoch()
        return self.logbook.time_batches(batches)

    def after_step(self, position: Position, lr: float, samples: int) -> None:
        """Check, save and record what is due after a step, and stop after a signal; a collective.

        samples: of the global batch. With --join, ranks agree only after the epoch. Raises Stopped on all ranks.
        """
        if not self.settings.join:
            self.check_and_save(position)
        self.logbook.after_step(position, lr, samples)
        self.stop_if_asked(position)

    def check_and_save(self, position: Position) -> None:
        """Run the actions of --monitor, --save-every and --checkpoint-every that are due; a collective.

        They come before any other forward, which would update BatchNorm's statistics in training mode and broadcast
        rank 0's through DDP's wrapper. The check comes first, so that the saved state has been checked or repaired.
        """
        step = position.step
        if warning := self.watch.after_step(step, last=step == self.plan.steps):
            self.recorder.note(f"warning: {warning}")
        for path in self.saver.after_step(step):
            self.recorder.note(f"saved {path}")
        self.keeper.after_step(position)

    def after_epoch(self, position: Position) -> None:
        """Score the epoch, and the model if an evaluation is due; save the best model; a collective.

        The evaluation does not change the model. Raises Stopped on all ranks.
        """
        self.trained = position.meter.over_ranks(self.ctx)
        self.logbook.read_clock()
        start, self.test, best = time.perf_counter(), None, False
        if position.step == self.plan.steps or position.epoch % self.settings.eval_every == 0:
            self.test = evaluate(self.trainer.method, self.loaders.test, self.ctx, self.trainer.task)
            best = self.best.update(self.test, position.epoch, position.step)
        self.logbook.after_epoch(position, self.trained, self.test, time.perf_counter() - start, best)
        if best:
            for path in self.saver.save_best(position.step):
                self.recorder.note(f"saved {path}")
        if math.isfinite(self.trained.loss) and (self.test is None or math.isfinite(self.test.loss)):
            self.diverged = None  # a run recovers from a single overflow, as with --amp fp16
        else:
            self.diverged = self.diverged or position.epoch
        self.stop_if_asked(position, now=True)

    def finish(self, position: Position, seconds: float) -> Result:
        """Return the result. seconds: from the first step to the last evaluation."""
        assert self.trained is not None
        assert self.test is not None  # the last epoch is always evaluated
        return Result(
            run=self.plan.run,
            epochs=position.epoch,
            steps=position.step,
            seconds=seconds,
            trained=self.trained,
            test=self.test,
            saved=tuple(self.saver.saved),
            replaced=self.saver.replaced,
            diverged=self.diverged,
            failed=self.saver.failed,
            replicas=self.saver.replicas,
        )

    def stop_if_asked(self, position: Position, *, now: bool = False) -> None:
        """Save a state and stop if any rank received a signal; a collective when due. Raises Stopped on all ranks.

        now: agree now, after a long evaluation; otherwise only at common steps. After the last step the run ends
        anyway.
        """
        if position.step == self.plan.steps or not (number := self.stopping.agree_on_signal(position.step, now=now)):
            return
        if self.settings.checkpoint_every is None:
            advice = "nothing was saved; use --checkpoint-every N to save states for --resume"
            raise Stopped(number, position.step, advice)
        try:
            self.keeper.after_step(position, now=True)
        except UserError as error:
            raise Stopped(number, position.step, f"its state is not saved: {error}") from error
        raise Stopped(number, position.step, "its state is saved; add --resume to continue")
