"""Times in the records, tested with injected delays, because a sleep never returns early on any machine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import list_fields
from support.scenarios import SMALL

from train.data.dataset import Images
from train.engine import train
from train.launch import RankContext
from train.metrics import evaluate
from train.recorders.base import EpochRecord, Recorder, StepRecord
from train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY = 0.02
ALONE = replace(SMALL, method="single", max_steps=None, epochs=2, limit_train=160, save_per_rank=False, log_interval=2)


class RecordKeeper(Recorder):
    """Keeps all records."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []

    def log(self, record: StepRecord) -> None:
        """Keep the record."""
        self.steps.append(record)

    def epoch(self, record: EpochRecord) -> None:
        """Keep the record."""
        self.epochs.append(record)


def delay(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sleeps before it calls `work`."""

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(DELAY)
        return work(*arguments, **named)

    return slow


def train_and_keep_records(**changes: Any) -> RecordKeeper:
    """Train 2 epochs of 5 steps, and return the records, by default of every second step."""
    recorder = RecordKeeper()
    train(replace(ALONE, **changes), RankContext(), recorder)
    return recorder


def test_slow_data_is_data_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to load a batch counts as data time and as part of the step's time."""
    monkeypatch.setattr(Images, "take", delay(Images.take))
    records = train_and_keep_records()
    assert list_fields(records.steps, "step") == [2, 4, 6, 8, 10]
    for record in records.steps:
        assert record.batch_time_s >= record.data_time_s >= DELAY
        assert record.samples_per_second <= 32 / DELAY
    for epoch in records.epochs:
        assert epoch.data_time_s >= DELAY
        assert epoch.epoch_time_s >= 5 * DELAY


def test_a_slow_step_is_batch_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the step itself counts as batch time but not as data time."""
    monkeypatch.setattr(Trainer, "run", delay(Trainer.run))
    records = train_and_keep_records()
    for record in records.steps:
        assert record.batch_time_s - record.data_time_s >= DELAY
    for epoch in records.epochs:
        assert epoch.batch_time_s - epoch.data_time_s >= DELAY
        assert epoch.samples_per_second * epoch.epoch_time_s == pytest.approx(160)


def test_evaluation_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation has its own time, which is not part of any step's or epoch's training time."""
    monkeypatch.setattr("train.engine.evaluate", delay(delay(evaluate)))
    records = train_and_keep_records(log_interval=1)
    assert all(epoch.test_time_s >= 2 * DELAY for epoch in records.epochs)
    in_steps = sum(list_fields(records.steps, "batch_time_s"))
    assert in_steps <= sum(list_fields(records.epochs, "epoch_time_s"))
