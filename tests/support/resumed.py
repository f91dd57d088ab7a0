"""Interrupt and resume runs in tests, and compare their states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support.scenarios import load
from train.engine import train
from train.methods import assign_mesh
from train.recorders.base import Recorder
from train.resume import state_path, states_folder
from train.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from train.launch import RankContext
    from train.metrics import MetricSums
    from train.recorders.base import EpochRecord
    from train.result import Result

# Four steps per epoch, eight in all, and a state saved after each step.
TINY = Settings(method="ddp", width=4, limit_train=70, batch_size=16, epochs=2, save_per_rank=True, checkpoint_every=1)
# Entries of a state that describe the launch instead of the training.
NOT_TRAINING = ("run_id", "versions", "host")


class Crash(Exception):
    """An injected crash, on all ranks."""


class Stops(Recorder):
    """Crashes a run right after a step, when the state of this step has been saved."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, step: int, epoch: int, metric_sums: MetricSums, samples_per_second: float) -> None:
        """Crash at the step."""
        if step == self.last:
            raise Crash


class Notes(Recorder):
    """Records the trained steps and the report of each epoch."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[Any] = []

    def step(self, step: int, epoch: int, metric_sums: MetricSums, samples_per_second: float) -> None:
        """Record the step."""
        self.steps.append(step)

    def epoch(self, record: EpochRecord) -> None:
        """Record the report."""
        self.epochs.append((record.step, record.epoch, record.trained, record.test))


def interrupt(ctx: RankContext, settings: Settings, step: int) -> None:
    """Train until just after `step`, and crash."""
    with pytest.raises(Crash):
        train(settings, assign_mesh(settings, ctx), Stops(step))


def resume(ctx: RankContext, settings: Settings) -> tuple[Result, Notes]:
    """Resume from --out, and return the result and the recorded reports."""
    notes = Notes()
    return train(replace(settings, resume=True), assign_mesh(settings, ctx), notes), notes


def whole(ctx: RankContext, settings: Settings) -> tuple[Result, Notes]:
    """Train without an interruption, and return the result and the recorded reports."""
    notes = Notes()
    return train(replace(settings, resume=False), assign_mesh(settings, ctx), notes), notes


def state_of(ctx: RankContext, settings: Settings, step: int) -> dict[str, Any]:
    """Return this rank's saved state of a step."""
    return load(state_path(states_folder(settings.out, settings.run), step, ctx.rank))


def differences(a: Any, b: Any, at: str = "") -> list[str]:
    """List the paths and values in two nested containers that are not bitwise equal."""
    if type(a) is not type(b):
        return [f"{at}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        messages = [] if list(a) == list(b) else [f"{at}: keys {set(a) ^ set(b)}"]
        return messages + [
            d for key in a if key in b and key not in NOT_TRAINING for d in differences(a[key], b[key], f"{at}.{key}")
        ]
    if isinstance(a, (list, tuple)):
        messages = [] if len(a) == len(b) else [f"{at}: lengths {len(a)} and {len(b)}"]
        return messages + [d for i, pair in enumerate(zip(a, b, strict=False)) for d in differences(*pair, f"{at}.{i}")]
    if isinstance(a, torch.Tensor):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        is_same = a.shape == b.shape and a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if is_same else [f"{at}: {a.shape} {b.shape}"]
    nan = isinstance(a, float) and math.isnan(a) and math.isnan(b)
    return [] if nan or a == b else [f"{at}: {a} and {b}"]


def assert_bitwise(ctx: RankContext, shared: Path, settings: Settings, stops: list[int]) -> None:
    """Check that a run with a crash after each of the stops ends bitwise equal to an uninterrupted run."""
    once, parts = replace(settings, out=shared / "once"), replace(settings, out=shared / "parts")
    result, notes = whole(ctx, once)
    interrupt(ctx, parts, stops[0])
    for stop in stops[1:]:
        interrupt(ctx, replace(parts, resume=True), stop)
    resumed, later = resume(ctx, parts)
    assert later.steps == list(range(stops[-1] + 1, result.steps + 1))
    assert later.epochs == notes.epochs[-len(later.epochs) :]
    assert resumed.steps == result.steps
    assert (resumed.trained, resumed.test, resumed.epochs) == (result.trained, result.test, result.epochs)
    assert [path.relative_to(parts.out) for path in resumed.saved] == [p.relative_to(once.out) for p in result.saved]
    actual = state_of(ctx, parts, result.steps)
    reference = state_of(ctx, once, result.steps)
    assert differences(actual, reference) == []
    files = [path.relative_to(once.out) for path in result.saved if path.suffix == ".pth"]
    assert files
    for file in files:
        assert differences(load(parts.out / file), load(once.out / file)) == [], file
