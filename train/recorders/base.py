"""The hooks that the engine calls on every rank, and the records that it hands over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.errors import Stopped

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import Console

    from train.launch import RankContext
    from train.metrics import Meter, Score
    from train.position import Plan
    from train.settings import Settings

STOPS = (KeyboardInterrupt, Stopped)  # exceptions by which a run ends because somebody wanted it


@dataclass(frozen=True)
class Start:
    """What is known before the first step.

    shares: samples of a global batch that each rank takes. parameters: of the whole model. samples: of the training
    set. peak_lr: the learning rate after warm-up. resumed_at: the step that an earlier run had come to, or None.
    """

    plan: Plan
    settings: Settings
    ctx: RankContext
    shares: tuple[int, ...]
    parameters: int
    samples: int
    peak_lr: float
    resumed_at: int | None = None


@dataclass(frozen=True)
class Pace:
    """How fast it went, per optimizer step.

    data_time_s: seconds of waiting for the next batch. batch_time_s: seconds of a whole step, that wait included.
    peak_memory_bytes: the most that the process has held so far, of the GPU's memory where it computes on one.
    """

    data_time_s: float
    batch_time_s: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class StepRecord:
    """All ranks' numbers since the record before, gathered at the same steps on all ranks.

    step, epoch: counted from 1. trained: over all ranks' samples. own: this rank's. mean, slowest: over the ranks.
    own_pace: this rank's. grad_norm: before clipping, of the last step; None where nothing is clipped. loss_scale:
    None but for fp16.
    """

    step: int
    epoch: int
    lr: float
    trained: Score
    own: Score
    mean: Pace
    slowest: Pace
    own_pace: Pace
    samples_per_second: float
    grad_norm: float | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of all ranks, counted from 1.

    test: None where the epoch was not evaluated. best: whether no epoch before was as accurate. pace: None where nobody
    asked for --log-dir or --log-interval, for it takes a collective; mean over the ranks, memory the largest of any.
    train_time_s, test_time_s: of this rank. gpu_utilization: percent, mean over the ranks; None where it is not known.
    """

    step: int
    epoch: int
    trained: Score
    test: Score | None
    samples_per_second: float
    train_time_s: float
    test_time_s: float
    best: bool = False
    pace: Pace | None = None
    gpu_utilization: float | None = None


def how_it_ended(value: BaseException | None) -> str:
    """Tell from the exception that ended a run, if one did: finished, stopped (by a signal) or failed."""
    if value is None:
        return "finished"
    return "stopped" if isinstance(value, STOPS) else "failed"


class Recorder:
    """Records nothing; base of the others.

    The hooks are called on every rank, in this order: start, then step (each one, this rank's own numbers) and log
    (every --log-interval steps, all ranks' numbers), epoch, end; note and warn at any time. None of them may
    communicate: what takes a collective is gathered by the engine. start may raise UserError; afterwards a recorder
    that fails must not end the run. Leaving it as a context manager closes it, with the exception that ended the run.

    console: where others may print lines without breaking what is shown; None where nothing could break.
    """

    console: Console | None = None

    def start(self, start: Start) -> None:
        """Take note of the plan, before the first step."""

    def step(self, step: int, epoch: int, meter: Meter, samples_per_second: float) -> None:
        """Take one optimizer step of this rank, counted from 1; reading the meter waits for the device."""

    def log(self, record: StepRecord) -> None:
        """Take the numbers since the record before."""

    def epoch(self, record: EpochRecord) -> None:
        """Take one epoch."""

    def note(self, text: str) -> None:
        """Take one line of text."""

    def warn(self, text: str) -> None:
        """Take one line of text that somebody should read."""

    def end(self, seconds: float) -> None:
        """Take note that the last step has been evaluated. seconds: since the first step."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close what is open."""
