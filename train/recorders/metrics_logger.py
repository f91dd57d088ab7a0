"""Measures a run, gathers the metrics of all ranks at the same steps, and passes records to the recorder."""

from __future__ import annotations

import re
import resource
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch

from train.mesh import gather_whole
from train.metrics import SUMS, Score, score_of
from train.recorders.base import EpochRecord, Pace, Recorder, Start, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from train.schedule import LearningRate, Plan, Position
    from train.trainer import Trainer

# Default of --log-interval, in optimizer steps.
INTERVAL = 50


@dataclass
class StepTimes:
    """Sums over steps of training, without evaluation.

    samples: over all ranks. waited: seconds of waiting for data. seconds: total time.
    """

    steps: int = 0
    samples: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    def pace(self, device: torch.device) -> Pace:
        """Return the mean times per step, and the peak memory."""
        steps = max(1, self.steps)
        return Pace(self.waited / steps, self.seconds / steps, read_peak_memory(device))


class MetricsLogger:
    """Connects the engine and the recorder on every rank.

    Each record needs one small collective, and records are created only with --log-dir or --log-interval. Times are
    measured on the host without synchronizing the GPU in each step. Reading the sums synchronizes it once per record,
    so the mean step time between records, and over an epoch, is correct.
    """

    def __init__(self, trainer: Trainer, plan: Plan, rate: LearningRate, samples: int, recorder: Recorder) -> None:
        self.trainer, self.plan, self.rate, self.samples = trainer, plan, rate, samples
        settings, self.recorder, self.ctx = trainer.settings, recorder, trainer.ctx
        self.gathers = settings.log_dir is not None or settings.log_interval is not None
        self.every = settings.log_interval or INTERVAL
        self.since_record, self.of_epoch = StepTimes(), StepTimes()
        self.utilization: list[float] = []

    def start(self, resumed_at: int | None = None) -> None:
        """Start the recorder. Raises the same UserError on all ranks if a log file cannot be written."""
        s, ranks = self.trainer.settings, self.ctx.mesh.data_size
        start = Start(
            plan=self.plan,
            settings=s,
            ctx=self.ctx,
            shares=tuple(len(range(rank, s.batch_size, ranks)) for rank in range(ranks)),
            parameters=self.trainer.method.parameters,
            samples=self.samples,
            peak_lr=self.rate.peak,
            resumed_at=resumed_at,
            metric=next(iter(self.trainer.task.metrics)),
        )
        with self.ctx.share_errors() if s.log_dir is not None else nullcontext():
            self.recorder.start(start)

    def begin_epoch(self) -> None:
        """Start the clock of an epoch."""
        self.of_epoch = StepTimes()
        self.began = self.last_read = time.perf_counter()

    def time_batches(self, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Yield the batches, and sum the time of waiting for them."""
        before = time.perf_counter()
        for batch in batches:
            waited = time.perf_counter() - before
            self.since_record.waited += waited
            self.of_epoch.waited += waited
            yield batch
            before = time.perf_counter()

    def after_step(self, position: Position, lr: float, samples: int) -> None:
        """Record an optimizer step; a collective if a record is due. samples: number of samples of the global batch."""
        for times in (self.since_record, self.of_epoch):
            times.steps += 1
            times.samples += samples
        speed = self.of_epoch.samples / (time.perf_counter() - self.began)
        self.recorder.step(position.step, position.epoch, position.metric_sums, speed)
        if self.gathers and position.step % self.every == 0:
            self.recorder.log(self._build_step_record(position, lr))

    def _build_step_record(self, position: Position, lr: float) -> StepRecord:
        sums = position.metric_sums.take().tolist()  # synchronizes with the device
        self.read_clock()
        local_pace, trainer = self.since_record.pace(self.ctx.device), self.trainer
        rows = self._gather(local_pace, sums if self.ctx.mesh.counts else [0.0] * SUMS)
        *totals, data, batch, memory, _ = zip(*rows, strict=True)
        record = StepRecord(
            step=position.step,
            epoch=position.epoch,
            lr=lr,
            trained=score_of([*map(sum, totals)], trainer.task),
            data_time_s=fmean(data),
            data_time_max_s=max(data),
            batch_time_s=fmean(batch),
            batch_time_max_s=max(batch),
            samples_per_second=self.since_record.samples / (max(batch) * self.since_record.steps),
            grad_norm=None if trainer.grad_norm is None else float(gather_whole(trainer.grad_norm)),
            loss_scale=trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
            peak_memory_bytes=int(max(memory)),
            own=score_of(sums, trainer.task),
            own_pace=local_pace,
        )
        self.since_record = StepTimes()
        return record

    def after_epoch(self, position: Position, trained: Score, test: Score | None, test_time: float, best: bool) -> None:
        """Record an epoch; a collective with --log-dir or --log-interval. test_time: seconds of the evaluation."""
        rows = self._gather(self.of_epoch.pace(self.ctx.device))
        *_, data, batch, memory, utilization = zip(*rows, strict=True)
        known_utilization = tuple(percent for percent in utilization if percent >= 0)
        self.utilization.clear()
        # With --join, the last steps of an epoch are smaller than the global batch.
        samples = self.of_epoch.samples
        if self.trainer.settings.join:
            samples = trained.samples // self.trainer.predictions_per_sample
        self.recorder.epoch(
            EpochRecord(
                epoch=position.epoch,
                step=position.step,
                trained=trained,
                test=test,
                best=best,
                epoch_time_s=self.of_epoch.seconds,
                test_time_s=test_time,
                data_time_s=fmean(data),
                batch_time_s=fmean(batch),
                # `trained` also includes the steps before a resume within the epoch, the elapsed time does not.
                samples_per_second=samples / (max(batch) * self.of_epoch.steps) if self.of_epoch.steps else 0.0,
                peak_memory_bytes=int(max(memory)),
                gpu_utilization=fmean(known_utilization) if known_utilization else None,
                gpu_utilization_by_rank=known_utilization,
                step_time_s=max(batch),
            )
        )

    def read_clock(self) -> None:
        """Add the time since the last call, after reading the sums, which waits for the device."""
        now = time.perf_counter()
        for times in (self.since_record, self.of_epoch):
            times.seconds += now - self.last_read
        self.last_read = now
        if self.gathers and (utilization := read_gpu_utilization(self.ctx.device)) is not None:
            self.utilization.append(utilization)

    def _gather(self, pace: Pace, sums: Sequence[float] = (0.0,) * SUMS) -> list[list[float]]:
        """Gather sums, times, memory, and GPU utilization (-1: unavailable) of all ranks; a collective.

        Without --log-dir and --log-interval, return the numbers of this rank.
        """
        utilization = fmean(self.utilization) if self.utilization else -1.0
        numbers = [*sums, *astuple(pace), utilization]
        if self.gathers:
            return self.ctx.gather(numbers)
        return [numbers]


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of torch's tensors on a GPU, otherwise of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux, the peak of getrusage() is inherited by child processes; VmHWM is reset when a program starts.
    with suppress(OSError):
        if match := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(match[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def read_gpu_utilization(device: torch.device) -> float | None:
    """Return the recent GPU utilization in percent (up to a second); None if unavailable.

    torch reads it with the optional package nvidia-ml-py.
    """
    if device.type != "cuda":
        return None
    with suppress(Exception):  # the exception depends on the missing part
        return float(torch.cuda.utilization(device))
    return None
