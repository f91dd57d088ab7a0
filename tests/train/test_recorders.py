"""The files that --log-dir asks for: their schema is frozen, and their loss does not end a run."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from resumed import TINY, Crash, Stops
from scenarios import SMALL, fsdp, load
from started import ROOT

from train.engine import Result, train
from train.errors import UserError
from train.launch import RankContext
from train.metrics import Best, Score
from train.recorders.composite import CompositeRecorder, make_recorder
from train.recorders.metrics_file import MetricsFile
from train.recorders.rank_log import LineFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from syncheck.testing import Rank
    from train.settings import Settings

ALONE = replace(SMALL, method="single", max_steps=None, epochs=2, limit_train=200, save_per_rank=False, log_interval=4)
# 6 steps an epoch; the fields in their order.
EVENTS = {
    "start": "event time run method world_size model parameters data samples batch_size shares epochs steps "
    "steps_per_epoch resumed_at launcher torch host device backend config",
    "step": "event time run step epoch lr loss accuracy samples data_time_s data_time_max_s batch_time_s "
    "batch_time_max_s samples_per_second grad_norm loss_scale peak_memory_bytes",
    "epoch": "event time run epoch step loss accuracy samples test_loss test_accuracy test_samples best epoch_time_s "
    "test_time_s data_time_s batch_time_s samples_per_second peak_memory_bytes gpu_utilization",
    "end": "event time run ended steps seconds test_accuracy best_accuracy best_epoch",
}


def run(settings: Settings, ctx: RankContext | None = None) -> Result:
    """Train with the recorders that run.py would make, but nothing on the terminal."""
    ctx = ctx or RankContext()
    with make_recorder(settings, ctx, "none") as recorder:
        return train(settings, ctx, recorder)


def records(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file of this process grow beyond 4 KiB, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_have_their_fields(tmp_path: Path) -> None:
    """Every event has exactly the documented fields, in order; steps and samples add up, also over an epoch's end."""
    result = run(replace(ALONE, log_dir=tmp_path, grad_clip=1.0, eval_every=2))
    lines = records(tmp_path / "single-clip1" / "metrics.jsonl")
    assert [line["event"] for line in lines] == ["start", "step", "epoch", "step", "step", "epoch", "end"]
    assert all(list(line) == EVENTS[line["event"]].split() for line in lines)
    steps, epochs = ([line for line in lines if line["event"] == event] for event in ("step", "epoch"))
    assert [(s["step"], s["epoch"], s["samples"]) for s in steps] == [(4, 1, 128), (8, 2, 128), (12, 2, 128)]
    assert [(e["step"], e["samples"]) for e in epochs] == [(6, 192), (12, 192)]
    for number in ("loss", "accuracy"):
        whole = sum(e[number] * e["samples"] for e in epochs)
        assert sum(s[number] * s["samples"] for s in steps) == pytest.approx(whole, rel=1e-12)
    assert all(s["batch_time_s"] > s["data_time_s"] > 0 and s["grad_norm"] > 0 for s in steps)
    assert all(1e7 < s["peak_memory_bytes"] < 1e11 for s in (*steps, *epochs))
    assert (epochs[0]["test_accuracy"], epochs[1]["test_accuracy"]) == (None, result.test.accuracy)
    assert lines[-1]["ended"] == "finished"
    assert (lines[-1]["steps"], lines[-1]["best_accuracy"], lines[-1]["best_epoch"]) == (12, result.test.accuracy, 2)
    assert lines[0]["config"]["batch_size"] == 32


def test_all_fields_are_documented() -> None:
    """docs/running.md names every event, and every field of it."""
    text = (ROOT / "docs" / "running.md").read_text()
    for event, names in EVENTS.items():
        (line,) = [line for line in text.split("\n- ") if line.startswith(f"**{event}**")]
        assert set(names.split()[3:]) - set(re.findall(r"`(\w+)`", line)) == set(), event


def test_a_later_run_replaces_the_files_and_a_failed_one_says_so(tmp_path: Path) -> None:
    """Nothing of the earlier run is left; the log ends with the traceback, and the metrics with `failed` and step."""
    run(replace(ALONE, log_dir=tmp_path))
    settings = replace(ALONE, log_dir=tmp_path, max_steps=5)
    with (  # noqa: PT012 - the recorder must see it
        pytest.raises(RuntimeError, match="planted"),
        make_recorder(settings, RankContext(), "none") as recorder,
    ):
        train(settings, RankContext(), recorder)
        raise RuntimeError("planted\nwith a second line")
    lines = records(tmp_path / "single" / "metrics.jsonl")
    assert [line["event"] for line in lines] == ["start", "step", "epoch", "end"]
    assert (lines[-1]["ended"], lines[-1]["steps"]) == ("failed", 5)
    log = (tmp_path / "single" / "rank_0.log").read_text()
    assert log.count("start of single: rank 0 of 1") == 1
    assert "failed after step 5: RuntimeError: planted\n    with a second line\n" in log
    assert "Traceback (most recent call last)" in log


def test_ctrl_c_is_a_stop(tmp_path: Path) -> None:
    """A run that somebody interrupts is not said to have failed, and its log has no traceback."""
    settings = replace(ALONE, log_dir=tmp_path, max_steps=2)
    with pytest.raises(KeyboardInterrupt), make_recorder(settings, RankContext(), "none") as recorder:  # noqa: PT012
        train(settings, RankContext(), recorder)
        raise KeyboardInterrupt
    assert records(tmp_path / "single" / "metrics.jsonl")[-1]["ended"] == "stopped"
    assert "Traceback" not in (tmp_path / "single" / "rank_0.log").read_text()


def test_resumed_metrics_go_on_from_the_step(tmp_path: Path) -> None:
    """What was recorded after the step resumed from is cut off, with how that run ended and what is half a line."""
    path = tmp_path / "single" / "metrics.jsonl"
    run(replace(ALONE, log_dir=tmp_path))
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    metrics = MetricsFile(path)
    metrics.resume_at(8)
    assert [line.get("step") for line in records(path)] == [None, 4, 6, 8]
    assert metrics.test == records(path)[2]["test_accuracy"]
    metrics.resume_at(3)
    assert [line["event"] for line in records(path)] == ["start"]
    path.unlink()
    metrics.resume_at(3)  # of a run that wrote none


def test_a_resumed_run_goes_on_with_its_files(tmp_path: Path) -> None:
    """After a crash between two states the metrics are those of an uninterrupted run, with one more start."""
    settings = replace(TINY, method="single", checkpoint_every=3, log_interval=2)
    whole = replace(settings, out=tmp_path / "a", log_dir=tmp_path / "a")
    run(whole)
    parts = replace(settings, out=tmp_path / "b", log_dir=tmp_path / "b")
    both = CompositeRecorder([make_recorder(parts, RankContext(), "none"), Stops(5)])
    with pytest.raises(Crash), both:
        train(parts, RankContext(), both)
    run(replace(parts, resume=True))
    expected, found = (records(tmp_path / name / "single" / "metrics.jsonl") for name in "ab")
    events = ["start", "step", "start", "step", "epoch", "step", "step", "epoch", "end"]
    assert [line["event"] for line in found] == events
    assert found[2]["resumed_at"] == 3
    for before, after in zip(expected[2:], found[3:], strict=True):
        assert (before["event"], before.get("step")) == (after["event"], after.get("step"))
        names = ("test_accuracy", "best", "best_epoch", "best_accuracy", "lr")
        names += ("loss", "samples") if after.get("step") != 4 or after["event"] == "epoch" else ()
        assert all(before.get(name) == after.get(name) for name in names), after
    assert found[3]["samples"] == 16  # of the steps since it was resumed
    log = (tmp_path / "b" / "single" / "rank_0.log").read_text()
    assert log.index("failed after step 5: Crash") < log.index("resumed after step 3") < log.index("finished")


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_costs_lines_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training ends as ever, stderr has one warning for each file, and what is in the files are whole lines."""
    run(replace(ALONE, log_dir=tmp_path, log_interval=1))
    path = tmp_path / "single" / "metrics.jsonl"
    assert 2000 < path.stat().st_size <= 4096
    assert records(path)[0]["event"] == "start"
    assert path.read_text().endswith("}\n")
    assert capsys.readouterr().err == (
        f"run.py: warning: cannot write the log {path}: File too large; training continues\n"
    )


@pytest.mark.usefixtures("small_files")
def test_a_line_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that does not fit leaves nothing of itself, and a shorter one after it is written."""
    file = LineFile(tmp_path / "log", append=False)
    for line in ("a" * 4000, "b" * 200, "c" * 200, "d"):
        file.write(f"{line}\n")
    file.close()
    assert (tmp_path / "log").read_text() == "a" * 4000 + "\nd\n"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_log_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    """A file in place of the folder, and a device that is full, are one line before any training."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the log .*/file/single/rank_0.log: Not a directory"):
        run(replace(ALONE, log_dir=tmp_path / "file"))
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write the log .*metrics.jsonl: No space left on device"):
        run(replace(ALONE, log_dir=tmp_path))


def test_tensorboard_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package it is one line that says what to install."""
    monkeypatch.setattr("train.recorders.tensorboard.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"^--tensorboard: .*pip install tensorboard"):
        run(replace(ALONE, log_dir=tmp_path, tensorboard=True))


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """TensorBoard's own reader finds the scalars at their steps; a later run replaces them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for epochs in (3, 2):
        run(replace(ALONE, log_dir=tmp_path, tensorboard=True, epochs=epochs))
    lines = records(tmp_path / "single" / "metrics.jsonl")
    events = reader.EventAccumulator(str(tmp_path / "single" / "tensorboard"))
    events.Reload()
    for tag, event, name in (("train/loss", "step", "loss"), ("test/accuracy", "epoch", "test_accuracy")):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines if line["event"] == event]
        assert [(scalar.step, scalar.value) for scalar in events.Scalars(tag)] == expected


@pytest.mark.syncheck(ranks=2)
def test_records_are_of_all_ranks_and_change_nothing(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Loss and accuracy weigh uneven shares by their samples; with the records the same bits are trained."""
    settings = replace(SMALL, batch_size=33, max_steps=6)
    shared = syncheck_rank.shared
    run(replace(settings, out=shared / "without"), ctx)
    result = run(replace(settings, out=shared / "with", log_dir=shared / "logs", log_interval=3), ctx)
    without, logged = (load(shared / name / f"ddp_rank{ctx.rank}.pth")["model"] for name in ("without", "with"))
    assert all(tensor.equal(logged[name]) for name, tensor in without.items())
    lines = records(shared / "logs" / "ddp" / "metrics.jsonl")
    assert (lines[0]["shares"], lines[0]["world_size"], lines[0]["backend"]) == ([17, 16], 2, "gloo")
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["samples"] for line in steps] == [99, 99]
    assert sum(line["loss"] for line in steps) / 2 == pytest.approx(result.trained.loss, rel=1e-12)
    assert sum(line["accuracy"] for line in steps) / 2 == pytest.approx(result.trained.accuracy, rel=1e-12)
    log = (shared / "logs" / "ddp" / f"rank_{ctx.rank}.log").read_text()
    assert f"rank {ctx.rank} of 2" in log
    assert f"of {(51, 48)[ctx.rank]} samples" in log
    assert f"saved {shared / 'with' / f'ddp_rank{ctx.rank}.pth'}" in log


@pytest.mark.parametrize("method", ["ddp", fsdp("fsdp")])
@pytest.mark.syncheck(ranks=2)
def test_the_norm_is_that_of_the_whole_gradient(ctx: RankContext, syncheck_rank: Rank, method: str) -> None:
    """Where ranks hold parts of the gradient too, what is recorded is the norm of all of it, as one process finds."""
    logs = syncheck_rank.shared
    settings = replace(ALONE, model="convnet", max_steps=4, log_dir=logs, grad_clip=1.0)
    run(replace(settings, method=method), ctx)
    if ctx.rank == 0:
        run(settings)
        found, expected = (records(logs / f"{name}-clip1" / "metrics.jsonl") for name in (method, "single"))
        assert found[1]["grad_norm"] == pytest.approx(expected[1]["grad_norm"], rel=1e-4)
        assert found[1]["loss"] == pytest.approx(expected[1]["loss"], rel=1e-5)


@pytest.mark.syncheck(ranks=2)
def test_the_log_has_what_the_monitor_found(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Each check that finds the ranks apart is a warning in every rank's log, with its codes; others are not."""
    for sync_bn, lines in ((False, [2, 4, 5]), (True, [])):
        settings = replace(SMALL, save_per_rank=False, monitor=2, max_steps=5, sync_bn=sync_bn)
        settings = replace(settings, log_dir=syncheck_rank.shared)
        run(settings, ctx)
        log = (settings.log_dir / settings.run / f"rank_{ctx.rank}.log").read_text()
        found = re.findall(r"warning: step (\d+): the ranks are out of sync: SYN201", log)
        assert [int(step) for step in found] == lines
        assert log.count("warning") == len(lines)


@pytest.mark.syncheck(ranks=2)
def test_all_ranks_hear_of_a_folder_that_one_cannot_write(ctx: RankContext, syncheck_rank: Rank) -> None:
    """One rank's log cannot be opened: both end with the same line that names it, and neither waits."""
    folder = syncheck_rank.shared / "ddp"
    folder.mkdir(exist_ok=True)
    (folder / "rank_1.log").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=r"rank 1: cannot write the log .*rank_1.log: Is a directory"):
        run(replace(SMALL, save_per_rank=False, log_dir=syncheck_rank.shared), ctx)


def test_best_is_the_first_of_equals() -> None:
    """A score that is not higher is not better; the state survives a resume."""
    best = Best()
    assert [best.update(Score(1.0, accuracy, 8), epoch, 10 * epoch) for epoch, accuracy in ((1, 0.5), (2, 0.75))] == [
        True,
        True,
    ]
    again = Best()
    again.restore(json.loads(json.dumps(best.state())))
    assert [again.update(Score(0.1, accuracy, 8), 3, 30) for accuracy in (0.5, 0.75)] == [False, False]
    assert again.state() == {"accuracy": 0.75, "epoch": 2, "step": 20}
