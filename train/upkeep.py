"""The work around optimizer steps: checks, checkpoints, states, signals and records."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from train.checkpoints.saver import Saver
from train.errors import Stopped, UserError
from train.launch.signals import Stopping
from train.metrics import Best, evaluate
from train.recorders.logbook import Logbook
from train.resume import Keeper
from train.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from train.checkpoints.lock import RunLock
    from train.launch.signals import Signals
    from train.loading import Loaders
    from train.metrics import Score
    from train.recorders.base import Recorder
    from train.schedule import LearningRate, Plan, Position
    from train.step import Step


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
        self.logbook.record_warning(self.watch.after_step(step, last=step == self.plan.steps))
        self.logbook.record_saved_files(self.saver.after_step(step))
        self.keeper.after_step(position)

    def after_epoch(self, position: Position) -> None:
        """Score the epoch, and the model if an evaluation is due; save the best model; a collective.

        The evaluation does not change the model. Raises Stopped on all ranks.
        """
        self.trained = position.meter.over_ranks(self.ctx)
        self.logbook.end_epoch(position)
        start, self.test, best = time.perf_counter(), None, False
        if position.step == self.plan.steps or position.epoch % self.settings.eval_every == 0:
            self.test = evaluate(self.trainer.method, self.loaders.test, self.ctx, self.trainer.task)
            best = self.best.update(self.test, position.epoch, position.step)
        self.logbook.after_epoch(position, self.trained, self.test, time.perf_counter() - start, best)
        if best:
            self.logbook.record_saved_files(self.saver.save_best(position.step))
        if math.isfinite(self.trained.loss) and (self.test is None or math.isfinite(self.test.loss)):
            self.diverged = None  # a run recovers from a single overflow, as with --amp fp16
        else:
            self.diverged = self.diverged or position.epoch
        self.stop_if_asked(position, now=True)

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
