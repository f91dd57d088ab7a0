"""Ranks agree on the step after which a signal stops them."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import read_json_lines
from support.resumed import TINY, differences, resume, state_of, whole
from support.scenarios import load

from train.engine import train
from train.errors import Stopped
from train.launch import RankContext
from train.launch.signals import SignalAgreement, count_steps_within
from train.recorders.base import Recorder
from train.recorders.composite import CompositeRecorder, make_recorder
from train.resume import state_path, states_folder

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank
    from train.metrics import MetricSums
    from train.recorders.base import EpochRecord


class FakeSignals:
    """Signals set by a test."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.deferred = False

    def defer(self) -> None:
        """Record the call."""
        self.deferred = True


class SignalSender(Recorder):
    """Sends a signal to this rank after a step."""

    def __init__(self, signals: FakeSignals, step: int, number: int) -> None:
        self.signals, self.at, self.number = signals, step, number

    def step(self, step: int, epoch: int, metric_sums: MetricSums, samples_per_second: float) -> None:
        """Send the signal after the step."""
        if step == self.at:
            self.signals.number = self.number


def test_steps_until_the_next_agreement() -> None:
    """Agreements are half a second apart, but at least one step."""
    assert [count_steps_within(10, seconds) for seconds in (0.1, 1.0, 100.0)] == [50, 5, 1]
    assert count_steps_within(1, 0.0) == 500_000


def test_one_process_needs_no_agreement() -> None:
    """A process without a group is stopped by its own signal at the next step."""
    signals = FakeSignals()
    stopping = SignalAgreement(RankContext(), signals)
    stopping.begin()
    assert signals.deferred
    assert stopping.agree_on_signal(1) == 0
    signals.number = signal.SIGINT
    assert stopping.agree_on_signal(2) == signal.SIGINT


def test_no_agreement_without_signals() -> None:
    """Without Signals, for example in a notebook, ranks never agree."""
    ctx = RankContext(0, 2, 0, backend="gloo")  # without a process group, a collective would raise
    stopping = SignalAgreement(ctx)
    stopping.begin()
    assert [stopping.agree_on_signal(step, now=True) for step in (1, 2)] == [0, 0]


@pytest.mark.syncheck(ranks=2)
def test_agreements_are_rare(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks agree at the same steps, every half second by the slower rank's clock."""
    now = [100.0]
    monkeypatch.setattr("train.launch.signals.time.monotonic", lambda: now[0])
    stopping, signals = SignalAgreement(ctx, FakeSignals()), FakeSignals()
    stopping.signals = signals
    agreed: list[int] = []
    for step in range(1, 101):
        now[0] += 0.01 * (1 + ctx.rank)  # 0.02 s a step on the slower rank
        before = stopping.last
        assert stopping.agree_on_signal(step) == 0
        agreed += [step] if stopping.last != before else []
    assert agreed == [1, 2, 27, 52, 77]
    signals.number = signal.SIGTERM if ctx.rank == 1 else 0
    assert [stopping.agree_on_signal(step) for step in (101, 102)] == [0, signal.SIGTERM]


@pytest.mark.syncheck(ranks=2)
def test_agreement_between_epochs_only(ctx: RankContext) -> None:
    """Ranks with different numbers of steps agree only between epochs."""
    stopping = SignalAgreement(ctx, FakeSignals(signal.SIGTERM), between=False)
    assert [stopping.agree_on_signal(step) for step in range(1, 4 + ctx.rank)] == [0] * (3 + ctx.rank)
    assert stopping.agree_on_signal(9, now=True) == signal.SIGTERM


@pytest.mark.syncheck(ranks=2)
def test_a_signal_to_one_rank_stops_all(ctx: RankContext, syncheck_rank: Rank) -> None:
    """After a signal to one rank, both save and stop after the same step, and the resumed run is bitwise equal."""
    settings = replace(TINY, checkpoint_every=1000, save_per_rank=False, out=syncheck_rank.shared / "stopped")
    signals = FakeSignals()
    with pytest.raises(Stopped) as caught:
        train(settings, ctx, SignalSender(signals, 2, signal.SIGUSR1) if ctx.rank == 1 else Recorder(), signals)
    assert caught.value.number == signal.SIGUSR1
    steps = ctx.gather(caught.value.step)
    assert steps == [steps[0]] * 2
    assert str(caught.value).startswith(f"stopped by SIGUSR1 after step {steps[0]}; its state is saved")
    assert state_of(ctx, settings, steps[0])["step"] == steps[0]
    result, notes = resume(ctx, settings)
    assert notes.steps == list(range(steps[0] + 1, result.steps + 1))
    once = replace(settings, out=syncheck_rank.shared / "once")
    whole(ctx, once)
    mine = state_of(ctx, settings, result.steps)
    reference = state_of(ctx, once, result.steps)
    assert differences(mine, reference) == []


class EpochSignalSender(Recorder):
    """Sends SIGTERM after the first epoch."""

    def __init__(self, signals: FakeSignals) -> None:
        self.signals = signals

    def epoch(self, record: EpochRecord) -> None:
        """Send the signal after epoch 1."""
        if record.epoch == 1:
            self.signals.number = signal.SIGTERM


def list_scores(folder: Path) -> list[Any]:
    """Return the losses and scores of a run without its times, and without its starts."""
    fields = ("epoch", "step", "loss", "test_loss", "test_accuracy", "best", "best_epoch")
    events = read_json_lines(folder / "single" / "metrics.jsonl")
    return [list(map(event.get, fields)) for event in events if event["event"] != "start"]


def test_stopped_after_an_evaluation(tmp_path: Path) -> None:
    """A run stopped after an evaluation evaluates the epoch again, with equal RNG state, scores and files."""
    settings = replace(TINY, method="single", model="mnist_convnet", width=None, checkpoint_every=1000, save_best=True)
    runs = {name: replace(settings, out=tmp_path / name, log_dir=tmp_path / name) for name in ("once", "parts")}
    with make_recorder(runs["once"], RankContext(), "none") as recorder:
        train(runs["once"], RankContext(), recorder)
    signals = FakeSignals()
    both = CompositeRecorder([make_recorder(runs["parts"], RankContext(), "none"), EpochSignalSender(signals)])
    with pytest.raises(Stopped, match="after step 4; its state is saved"), both:
        train(runs["parts"], RankContext(), both, signals)
    with make_recorder(runs["parts"], RankContext(), "none") as recorder:
        train(replace(runs["parts"], resume=True), RankContext(), recorder)
    mine, reference = (state_of(RankContext(), run, 8) for run in runs.values())
    assert differences(mine["model"], reference["model"]) == []
    assert mine["rng"]["torch"].equal(reference["rng"]["torch"])
    assert list_scores(tmp_path / "parts") == list_scores(tmp_path / "once")
    best = [load(tmp_path / name / "best" / "single" / "rank_0.pth") for name in runs]
    assert differences(*best) == []


@pytest.mark.syncheck(ranks=2)
def test_stop_without_checkpoint_every(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Without states, the error names --checkpoint-every; a signal at the last step does not stop the run."""
    settings = replace(TINY, checkpoint_every=None, save_per_rank=False, out=syncheck_rank.shared / "out")
    with pytest.raises(Stopped, match=r"step 1; nothing was saved; use --checkpoint-every N"):
        train(settings, ctx, Recorder(), FakeSignals(signal.SIGTERM))
    assert not list(settings.out.glob("**/*.pth"))
    signals = FakeSignals()
    assert train(settings, ctx, SignalSender(signals, 8, signal.SIGTERM), signals).steps == 8


@pytest.mark.syncheck(ranks=2)
def test_failed_save_at_a_signal(ctx: RankContext, syncheck_rank: Rank) -> None:
    """If the state cannot be saved after a signal, all ranks stop, and the error names the reason."""
    settings = replace(TINY, checkpoint_every=1000, save_per_rank=False, out=syncheck_rank.shared / "out")
    signals = FakeSignals()

    class StateBlocker(Recorder):
        def step(self, *_: Any) -> None:
            """Create a file at the path of the states' folder."""
            if ctx.rank == 1:
                settings.out.mkdir(exist_ok=True)
                states_folder(settings.out, settings.run).parent.write_text("in the way")
            signals.number = signal.SIGTERM

    with pytest.raises(Stopped, match=r"after step 1; its state is not saved: .*cannot write .*: (Not a dir|File ex)"):
        train(settings, ctx, StateBlocker(), signals)
    assert not state_path(states_folder(settings.out, settings.run), 1, 0).exists()
