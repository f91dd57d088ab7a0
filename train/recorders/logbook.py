"""Measures a run, gathers the ranks' numbers at steps that all of them know, and hands records to the recorder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from train.metrics import Score, score_of
from train.recorders.base import EpochRecord, Pace, Recorder, Start, StepRecord
from train.recorders.usage import gpu_utilization, peak_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from train.job import Job
    from train.position import Position

INTERVAL = 50  # optimizer steps between two records, where --log-interval does not say


@dataclass
class Stretch:
    """Some steps of training, evaluation left out. waited: seconds for data. seconds: in all. samples: of all ranks."""

    steps: int = 0
    samples: int = 0
    waited: float = 0.0
    seconds: float = 0.0

    def pace(self, device: torch.device) -> Pace:
        """Give the time of one step."""
        steps = max(1, self.steps)
        return Pace(self.waited / steps, self.seconds / steps, peak_memory(device))


class Logbook:
    """Between the engine and the recorder, on every rank.

    Records take one small collective each, and only where --log-dir or --log-interval asks for them. Times are those of
    the host: a GPU is not waited for at each step. Reading the sums at a record waits for it once, so that from record
    to record, and over an epoch, the time of a step is true.
    """

    def __init__(self, job: Job, recorder: Recorder, position: Position) -> None:
        settings = job.settings
        self.job, self.recorder, self.ctx = job, recorder, job.ctx
        self.gathers = settings.log_dir is not None or settings.log_interval is not None
        self.every = settings.log_interval or INTERVAL
        self.since_record, self.of_epoch = Stretch(), Stretch()
        # The meter counts by epochs, records by steps: what it counted between the last record and the epoch's end.
        self.carried = torch.zeros_like(position.meter.sums)
        self.utilization: list[float] = []

    def start(self, resumed_at: int | None = None) -> None:
        """Tell the recorder what lies ahead. Raises UserError, on all ranks alike, where a file cannot be written."""
        job, s, world_size = self.job, self.job.settings, self.ctx.world_size
        start = Start(
            plan=job.plan,
            settings=s,
            ctx=self.ctx,
            shares=tuple(len(range(rank, s.batch_size, world_size)) for rank in range(world_size)),
            parameters=sum(p.numel() for p in job.method.module.parameters()),
            samples=job.sampler.samples,
            peak_lr=job.rate.peak,
            resumed_at=resumed_at,
        )
        if s.log_dir is None:
            self.recorder.start(start)
            return
        with self.ctx.together():
            self.recorder.start(start)

    def begin_epoch(self) -> None:
        """Start the clock."""
        self.of_epoch = Stretch()
        self.began = self.mark = time.perf_counter()

    def waited_for(self, batches: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
        """Pass the batches on, and add up how long each let us wait."""
        before = time.perf_counter()
        for batch in batches:
            waited = time.perf_counter() - before
            self.since_record.waited += waited
            self.of_epoch.waited += waited
            yield batch
            before = time.perf_counter()

    def after_step(self, position: Position, lr: float, samples: int) -> None:
        """Record what is due after this optimizer step; a collective if anything is. samples: of the global batch."""
        for stretch in (self.since_record, self.of_epoch):
            stretch.steps += 1
            stretch.samples += samples
        speed = self.of_epoch.samples / (time.perf_counter() - self.began)
        self.recorder.step(position.step, position.epoch, position.meter, speed)
        if self.gathers and position.step % self.every == 0:
            self.recorder.log(self._record(position, lr))

    def _record(self, position: Position, lr: float) -> StepRecord:
        sums = (self.carried + position.meter.take()).tolist()  # waits for the device
        self._read_clock()
        own = self.since_record.pace(self.ctx.device)
        rows = self._gather(sums, own)
        mean, slowest = _over_ranks(rows)
        trained = score_of([sum(row[i] for row in rows) for i in range(3)])
        seconds = slowest.batch_time_s * self.since_record.steps
        trainer = self.job.trainer
        record = StepRecord(
            step=position.step,
            epoch=position.epoch,
            lr=lr,
            trained=trained,
            own=score_of(sums),
            mean=mean,
            slowest=slowest,
            own_pace=own,
            samples_per_second=trained.samples / seconds,
            grad_norm=_number(trainer.grad_norm),
            loss_scale=trainer.scaler.get_scale() if trainer.scaler.is_enabled() else None,
        )
        self.since_record = Stretch()
        self.carried.zero_()
        return record

    def end_epoch(self, position: Position) -> None:
        """Stop the clock, after the sums of the epoch have been read."""
        self._read_clock()
        self.carried += position.meter.take()

    def warned(self, text: str) -> None:
        """Take note of what somebody should know; empty for nothing."""
        if text:
            self.recorder.warn(text)

    def saved(self, paths: Iterable[Path]) -> None:
        """Take note of the files that this process has written."""
        for path in paths:
            self.recorder.note(f"saved {path}")

    def after_epoch(self, position: Position, trained: Score, test: Score | None, test_time: float, best: bool) -> None:
        """Record the epoch; a collective where records are asked for. test_time: seconds of the evaluation."""
        pace = utilization = None
        elapsed = self.of_epoch.seconds
        if self.gathers:
            rows = self._gather([0.0] * 3, self.of_epoch.pace(self.ctx.device))
            mean, slowest = _over_ranks(rows)
            pace = Pace(mean.data_time_s, mean.batch_time_s, slowest.peak_memory_bytes)
            known = [row[6] for row in rows if row[6] >= 0]
            utilization = sum(known) / len(known) if known else None
            elapsed = slowest.batch_time_s * self.of_epoch.steps
        self.utilization.clear()
        # Under --join the last steps of an epoch are smaller, and an epoch is never resumed in the middle.
        samples = trained.samples if self.job.settings.join else self.of_epoch.samples
        self.recorder.epoch(
            EpochRecord(
                step=position.step,
                epoch=position.epoch,
                trained=trained,
                test=test,
                # Of what this process has seen: a run that was resumed within the epoch has counted more.
                samples_per_second=samples / elapsed if self.of_epoch.steps else 0.0,
                train_time_s=self.of_epoch.seconds,
                test_time_s=test_time,
                best=best,
                pace=pace,
                gpu_utilization=utilization,
            )
        )

    def _read_clock(self) -> None:
        now = time.perf_counter()
        for stretch in (self.since_record, self.of_epoch):
            stretch.seconds += now - self.mark
        self.mark = now
        if self.gathers and (busy := gpu_utilization(self.ctx.device)) is not None:
            self.utilization.append(busy)

    def _gather(self, sums: list[float], pace: Pace) -> list[list[float]]:
        """Give every rank all ranks' sums, times, memory, and the GPU's utilization or -1; a collective."""
        busy = sum(self.utilization) / len(self.utilization) if self.utilization else -1.0
        return self.ctx.gather_numbers([*sums, pace.data_time_s, pace.batch_time_s, pace.peak_memory_bytes, busy])


def _over_ranks(rows: list[list[float]]) -> tuple[Pace, Pace]:
    """Give the mean over the ranks, and the largest of each number."""
    columns = list(zip(*rows, strict=True))[3:6]
    data, batch, memory = (sum(column) / len(column) for column in columns)
    slowest_data, slowest_batch, most_memory = map(max, columns)
    return Pace(data, batch, int(memory)), Pace(slowest_data, slowest_batch, int(most_memory))


def _number(norm: Tensor | None) -> float | None:
    """Read a norm; of parts of a gradient (fsdp) it is divided over the ranks too, and reading it a collective."""
    if norm is None:
        return None
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
