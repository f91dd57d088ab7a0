"""What the records say of time, by delays that are planted: a sleep takes no less than it says, on any machine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from scenarios import SMALL

from train.data.dataset import Images
from train.engine import train
from train.launch import RankContext
from train.metrics import evaluate
from train.recorders.base import EpochRecord, Recorder, StepRecord
from train.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable

DELAY = 0.02
ALONE = replace(SMALL, method="single", max_steps=None, epochs=2, limit_train=160, save_per_rank=False, log_interval=2)


class Kept(Recorder):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.epochs: list[EpochRecord] = []

    def log(self, record: StepRecord) -> None:
        """Keep it."""
        self.steps.append(record)

    def epoch(self, record: EpochRecord) -> None:
        """Keep it."""
        self.epochs.append(record)


def delayed(work: Callable[..., Any]) -> Callable[..., Any]:
    """Do it after a pause."""

    def slow(*arguments: Any, **named: Any) -> Any:
        time.sleep(DELAY)
        return work(*arguments, **named)

    return slow


def kept(**changes: Any) -> Kept:
    """Train, and return the records: of every second of 5 steps, twice."""
    recorder = Kept()
    train(replace(ALONE, **changes), RankContext(), recorder)
    return recorder


def test_slow_data_is_data_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that takes its time counts as waiting for data, and as part of the step."""
    monkeypatch.setattr(Images, "take", delayed(Images.take))
    records = kept()
    assert [record.step for record in records.steps] == [2, 4, 6, 8, 10]
    for record in records.steps:
        assert record.mean.batch_time_s >= record.mean.data_time_s >= DELAY
        assert record.samples_per_second <= 32 / DELAY
    for epoch in records.epochs:
        assert epoch.pace is not None
        assert epoch.pace.data_time_s >= DELAY
        assert epoch.train_time_s >= 5 * DELAY


def test_a_slow_step_is_batch_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step itself takes is in its time, and not in that of the data."""
    monkeypatch.setattr(Step, "run", delayed(Step.run))
    records = kept()
    for record in records.steps:
        assert record.mean.batch_time_s - record.mean.data_time_s >= DELAY
    for epoch in records.epochs:
        assert epoch.pace is not None
        assert epoch.pace.batch_time_s - epoch.pace.data_time_s >= DELAY
        assert epoch.samples_per_second * epoch.train_time_s == pytest.approx(160)


def test_an_evaluation_is_no_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test set's time is told on its own: in no step's time, and not in the epoch's."""
    monkeypatch.setattr("train.engine.evaluate", delayed(delayed(evaluate)))
    records = kept(log_interval=1)
    assert all(epoch.test_time_s >= 2 * DELAY for epoch in records.epochs)
    in_steps = sum(record.mean.batch_time_s for record in records.steps)
    assert in_steps <= sum(epoch.train_time_s for epoch in records.epochs)
