"""Metrics and what is shown of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from train.launch import RankContext
from train.metrics import Meter, Score
from train.recorders.base import EpochRecord, Pace, Recorder, Start, StepRecord
from train.recorders.progress import Bar, Lines, make_progress
from train.schedule import Plan
from train.settings import Settings

if TYPE_CHECKING:
    import pytest

START = Start(
    Plan("ddp-syncbn", epochs=10, steps=440, steps_per_epoch=44), Settings(), RankContext(), (16, 16), 1234, 1437, 0.1
)


def epoch(step: int, epoch: int, trained: Score, test: Score | None, speed: float) -> EpochRecord:
    """Make a record of an epoch that took no time."""
    return EpochRecord(step, epoch, trained, test, speed, 0.0, 0.0)


def test_meter_weighs_by_samples() -> None:
    """Batches of different size weigh by their samples, not equally."""
    meter = Meter(torch.device("cpu"))
    assert math.isnan(meter.local().accuracy)
    meter.add(torch.tensor(3.0), torch.eye(3), torch.tensor([0, 1, 2]))
    meter.add(torch.tensor(1.0), torch.eye(1, 3), torch.tensor([2]))
    assert meter.local() == meter.over_ranks(RankContext()) == Score(loss=1.0, accuracy=0.75, samples=4)


def test_an_infinite_loss_leaves_the_next_records() -> None:
    """One batch whose loss is no number spoils its own record, and the mean of the epoch, but not what comes after."""
    meter = Meter(torch.device("cpu"))
    for loss in (math.inf, 2.0):
        meter.add(torch.tensor(loss), torch.eye(2), torch.tensor([0, 0]))
        assert meter.take().tolist() == [loss, 1, 2]
    assert meter.local() == Score(loss=math.inf, accuracy=0.5, samples=4)
    assert meter.take().tolist() == [0, 0, 0]


def test_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal each epoch is one line with its numbers and no escape codes."""
    with make_progress("auto", is_main=True) as progress:
        assert isinstance(progress, Lines)
        progress.start(START)
        progress.step(1, 1, Meter(torch.device("cpu")), 100.0)
        progress.epoch(epoch(44, 1, Score(0.5, 0.75, 44), Score(0.25, 0.875, 8), 1234.5))
    assert capsys.readouterr().out == (
        "ddp-syncbn: epoch  1/10  step 44/440  loss 0.5000  train 75.0%  test 87.5%  1234 samples/s\n"
    )


def test_only_the_main_rank_shows_anything() -> None:
    """Other ranks, and --progress none, are silent; a bar is there for who wants one."""
    assert type(make_progress("bar", is_main=False)) is Recorder
    assert type(make_progress("none", is_main=True)) is Recorder
    assert type(make_progress("bar", is_main=True)) is Bar


def test_bar_ends_with_the_last_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar names epoch, step, loss, accuracy and speed, and fits a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with make_progress("bar", is_main=True) as progress:
        progress.start(START)
        for step in range(1, 441):
            progress.step(step, 10, Meter(torch.device("cpu")), 12345.0)
        progress.epoch(epoch(440, 10, Score(0.5, 1.0, 44), Score(0.25, 0.989, 8), 12345.0))
    first, second = capsys.readouterr().out.rstrip().splitlines()
    assert first.startswith("ddp-syncbn ")
    assert first.rstrip().endswith("epoch 10/10  step 440/440")
    assert max(len(first.rstrip()), len(second.rstrip())) <= 80
    assert second.strip() == "loss 0.5000  train 100.0%  test 98.9%  12345 samples/s"


def test_lines_of_steps_are_there_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """--log-interval prints a line with the learning rate; an epoch that is not evaluated has no test accuracy."""
    pace = Pace(0.1, 0.2, 1)
    score = Score(0.5, 0.75, 44)
    for interval in (None, 22):
        with make_progress("plain", is_main=True) as progress:
            progress.start(replace(START, settings=Settings(log_interval=interval)))
            progress.log(StepRecord(22, 1, 0.05, score, score, pace, pace, pace, 1234.5))
            progress.epoch(epoch(44, 1, score, None, 1234.5))
    of_epoch = "ddp-syncbn: epoch  1/10  step 44/440  loss 0.5000  train 75.0%  1234 samples/s"
    of_step = "ddp-syncbn: epoch  1/10  step 22/440  loss 0.5000  train 75.0%  lr 0.05  1234 samples/s"
    assert capsys.readouterr().out.splitlines() == [of_epoch, of_step, of_epoch]


def test_bar_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the pace since its first step, a resumed run's too; the longest numbers fit 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    seconds = iter((0.0, 100.0))
    monkeypatch.setattr("train.recorders.progress.time.monotonic", lambda: next(seconds, 100.0))
    plan = Plan("ddp-syncbn", epochs=300, steps=117300, steps_per_epoch=391)
    with make_progress("bar", is_main=True) as progress:
        progress.start(replace(START, plan=plan, resumed_at=110000))
        progress.step(110001, 282, Meter(torch.device("cpu")), 12345.0)
        progress.step(110100, 282, Meter(torch.device("cpu")), 12345.0)
    first, second = capsys.readouterr().out.rstrip().splitlines()
    assert first.rstrip().endswith("epoch 282/300  step 110100/117300  2:01:13 left")
    assert max(len(first.rstrip()), len(second.rstrip())) <= 80
