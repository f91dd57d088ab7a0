"""The hooks that the engine calls on every rank, and the records that it passes to them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from train.launch import RankContext
    from train.metrics import MetricSums, Score
    from train.schedule import Plan
    from train.settings import Settings


@dataclass(frozen=True)
class Start:
    """The run before its first step.

    shares: samples of a global batch per rank. parameters: number of parameters of the whole model. samples: number of
    training samples. peak_lr: learning rate after warm-up. resumed_at: last step of the resumed run, or None. metric:
    the first metric of the task.
    """

    plan: Plan
    settings: Settings
    ctx: RankContext
    shares: tuple[int, ...]
    parameters: int
    samples: int
    peak_lr: float
    resumed_at: int | None = None
    metric: str = "accuracy"


@dataclass(frozen=True)
class Pace:
    """Mean times per optimizer step, and peak memory.

    data_time_s: seconds of waiting for the next batch. batch_time_s: seconds of a whole step, including the wait.
    peak_memory_bytes: peak memory of the process so far, on the GPU if it uses a GPU.
    """

    data_time_s: float
    batch_time_s: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class StepRecord:
    """Metrics since the previous record, gathered from all ranks at the same step.

    The fields are those of the event in metrics.jsonl (docs/running.md), in its order, and two more. trained: score
    over the samples of all ranks. own, own_pace: of this rank.
    """

    step: int
    epoch: int
    lr: float
    trained: Score
    data_time_s: float
    data_time_max_s: float
    batch_time_s: float
    batch_time_max_s: float
    samples_per_second: float
    grad_norm: float | None
    loss_scale: float | None
    peak_memory_bytes: int
    own: Score
    own_pace: Pace


@dataclass(frozen=True)
class EpochRecord:
    """Metrics of an epoch over all ranks.

    The fields are those of the event in metrics.jsonl, in its order, and one more. trained, test: scores; test is
    None if the epoch was not evaluated. step_time_s: mean time of a step, of the slowest rank. Without --log-dir and
    --log-interval, times are of this rank, because gathering them is a collective.
    """

    epoch: int
    step: int
    trained: Score
    test: Score | None
    best: bool
    epoch_time_s: float
    test_time_s: float
    data_time_s: float
    batch_time_s: float
    samples_per_second: float
    peak_memory_bytes: int
    gpu_utilization: float | None
    gpu_utilization_by_rank: tuple[float, ...]
    step_time_s: float


class Recorder(AbstractContextManager["Recorder"]):
    """Base class, which records nothing.

    The hooks are called on every rank in this order: start; step (every step, metrics of this rank) and log (every
    --log-interval steps, metrics of all ranks); epoch. note may be called at any time. A hook must not
    communicate, because the engine has already gathered all metrics. start may raise UserError; later failures must not
    end the run. A recorder is a context manager, which closes it at the end.

    console: a console for messages of other components, so that they do not break a progress bar; None without a bar.
    """

    console: Console | None = None

    def start(self, start: Start) -> None:
        """Start recording, before the first step."""

    def step(self, step: int, epoch: int, metric_sums: MetricSums, samples_per_second: float) -> None:
        """Record an optimizer step of this rank, counted from 1; reading the sums synchronizes with the device."""

    def log(self, record: StepRecord) -> None:
        """Record the metrics since the previous record."""

    def epoch(self, record: EpochRecord) -> None:
        """Record an epoch."""

    def note(self, text: str) -> None:
        """Record a line of text."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        """Close the recorder. error: the exception that ended the run, or None."""
