"""Metrics, and the progress display on rank 0."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch

from train.launch import RankContext
from train.metrics import MetricSums, Score
from train.recorders.base import EpochRecord, Pace, Recorder, Start, StepRecord
from train.recorders.progress import Bar, Lines, format_top5, make_progress
from train.schedule import Plan
from train.settings import Settings
from train.task import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

START = Start(
    Plan("ddp-syncbn", epochs=10, steps=440, steps_per_epoch=44), Settings(), RankContext(), (16, 16), 1234, 1437, 0.1
)


def epoch(step: int, epoch: int, trained: Score, test: Score | None, speed: float) -> EpochRecord:
    """Return the record of an epoch with steps of 12.3 ms and other times zero."""
    times = {"epoch_time_s": 0.0, "test_time_s": 0.0, "data_time_s": 0.0, "batch_time_s": 0.0, "step_time_s": 0.0123}
    unknown = {"best": False, "peak_memory_bytes": 1, "gpu_utilization": None, "gpu_utilization_by_rank": ()}
    return EpochRecord(epoch=epoch, step=step, trained=trained, test=test, samples_per_second=speed, **times, **unknown)


def test_meter_weights_by_samples() -> None:
    """Batches are weighted by their number of samples."""
    metric_sums = MetricSums(torch.device("cpu"))
    assert math.isnan(metric_sums.local().accuracy)
    metric_sums.add(torch.tensor(3.0), torch.eye(3), torch.tensor([0, 1, 2]))
    metric_sums.add(torch.tensor(1.0), torch.eye(1, 3), torch.tensor([2]))
    assert metric_sums.local() == metric_sums.over_ranks(RankContext()) == Score(loss=1.0, accuracy=0.75, samples=4)


def test_an_infinite_loss_does_not_affect_later_records() -> None:
    """An infinite loss makes its own record and the epoch's mean infinite, but not later records."""
    metric_sums = MetricSums(torch.device("cpu"))
    for loss in (math.inf, 2.0):
        metric_sums.add(torch.tensor(loss), torch.eye(2), torch.tensor([0, 0]))
        assert metric_sums.take().tolist()[:3] == [loss, 1, 2]
    assert metric_sums.local() == Score(loss=math.inf, accuracy=0.5, samples=4)
    assert metric_sums.take().tolist() == [0, 0, 0, 0]


def test_top5_counts_the_five_most_probable_classes() -> None:
    """Top-5 accuracy counts classes up to the fifth place; five classes have none, and labels may be probabilities."""
    logits = torch.tensor([0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]).expand(7, 7)
    metric_sums = MetricSums(torch.device("cpu"))
    metric_sums.add(torch.tensor(7.0), logits[:4], torch.arange(4))
    metric_sums.add(torch.tensor(7.0), logits[4:], torch.eye(7)[4:])  # as after mixup
    assert metric_sums.local() == metric_sums.over_ranks(RankContext()) == Score(2.0, 1 / 7, 7, top5=5 / 7)
    metric_sums = MetricSums(torch.device("cpu"))
    metric_sums.add(torch.tensor(5.0), logits[:5, :5], torch.arange(5))
    assert metric_sums.local() == Score(1.0, 1 / 5, 5, top5=None)


def test_top5_is_not_shown_for_other_counts() -> None:
    """The second count of a task without the metric top5_accuracy, such as a squared error, is not a top-5 accuracy."""

    class Errors(Task):
        metrics: ClassVar[Mapping[str, bool]] = {"mae": False, "mse": False}

        def compute(self, loss: float, counts: tuple[float, float]) -> dict[str, float]:
            return {"mae": counts[0], "mse": counts[1]}

    assert format_top5(Score(0.5, 0.75, 44, 0.9)) == "  top-5 90.0%"
    assert format_top5(Score(0.5, 0.75, 44)) == ""
    assert format_top5(Score(0.5, 0.75, 44, 0.9, Errors())) == ""


def test_lines_are_plain(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal, each epoch prints one line without escape codes."""
    with make_progress("auto", is_main=True) as progress:
        assert isinstance(progress, Lines)
        progress.start(START)
        progress.step(1, 1, MetricSums(torch.device("cpu")), 100.0)
        progress.epoch(epoch(44, 1, Score(0.5, 0.75, 44), Score(0.25, 0.875, 8), 1234.5))
        progress.epoch(epoch(88, 2, Score(0.5, 0.75, 44, 0.9), Score(0.25, 0.875, 8, 0.985), 1234.5))
    assert capsys.readouterr().out == (
        "ddp-syncbn: epoch  1/10  step 44/440  loss 0.5000  train 75.0%  test 87.5%  1234 samples/s, 12.3 ms/step\n"
        "ddp-syncbn: epoch  2/10  step 88/440  loss 0.5000  train 75.0%  test 87.5%  top-5 98.5%  1234 samples/s, "
        "12.3 ms/step\n"
    )


def test_only_the_main_rank_shows_progress() -> None:
    """Only the main rank displays a bar, and --progress none displays nothing."""
    assert type(make_progress("bar", is_main=False)) is Recorder
    assert type(make_progress("none", is_main=True)) is Recorder
    assert type(make_progress("bar", is_main=True)) is Bar


def test_bar_ends_with_the_last_numbers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The final bar shows epoch, step, loss, accuracy and speed, and fits 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with make_progress("bar", is_main=True) as progress:
        progress.start(START)
        for step in range(1, 441):
            progress.step(step, 10, MetricSums(torch.device("cpu")), 12345.0)
        progress.epoch(epoch(440, 10, Score(0.5, 1.0, 44), Score(0.25, 0.989, 8, 1.0), 12345.0))
    first, second, third = capsys.readouterr().out.rstrip().splitlines()
    assert first.startswith("ddp-syncbn ")
    assert first.rstrip().endswith("epoch 10/10  step 440/440")
    assert max(len(line.rstrip()) for line in (first, second, third)) <= 80
    assert second.strip() == "loss 0.5000  train 100.0%  test 98.9%  12345 samples/s"
    assert third.strip() == "12.3 ms/step  top-5 100.0%"


def test_log_interval_prints_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """--log-interval prints a line with the learning rate; an epoch without evaluation has no test accuracy."""
    pace = Pace(0.1, 0.2, 1)
    score = Score(0.5, 0.75, 44)
    for interval in (None, 22):
        with make_progress("plain", is_main=True) as progress:
            progress.start(replace(START, settings=Settings(log_interval=interval)))
            progress.log(StepRecord(22, 1, 0.05, score, 0.1, 0.1, 0.2, 0.2, 1234.5, None, None, 1, score, pace))
            progress.epoch(epoch(44, 1, score, None, 1234.5))
    epoch_line = "ddp-syncbn: epoch  1/10  step 44/440  loss 0.5000  train 75.0%  1234 samples/s, 12.3 ms/step"
    step_line = "ddp-syncbn: epoch  1/10  step 22/440  loss 0.5000  train 75.0%  lr 0.05  1234 samples/s, 200.0 ms/step"
    assert capsys.readouterr().out.splitlines() == [epoch_line, step_line, epoch_line]


def test_bar_estimates_the_remaining_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run estimates the remaining time from its pace since the resume; long numbers fit 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    plan = Plan("ddp-syncbn", epochs=300, steps=117300, steps_per_epoch=391)
    with make_progress("bar", is_main=True) as progress:
        seconds = 0.0
        progress.bar.get_time = lambda: seconds
        progress.start(replace(START, plan=plan, resumed_at=110000))
        progress.step(110001, 282, MetricSums(torch.device("cpu")), 12345.0)
        seconds = 100.0
        progress.step(110100, 282, MetricSums(torch.device("cpu")), 12345.0)
    first, second, third = capsys.readouterr().out.rstrip().splitlines()
    assert first.rstrip().endswith("epoch 282/300  step 110100/117300  2:01:13 left")
    assert max(len(line.rstrip()) for line in (first, second, third)) <= 80
