"""The files of --log-dir: the schema is frozen, and a failed write does not end the run."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.listings import find_all, find_texts, list_fields, read_json_lines
from support.resumed import TINY, Crash, Stops
from support.scenarios import SMALL, fsdp, load
from support.started import ROOT
from support.states import list_differing

from train.engine import train
from train.errors import UserError
from train.launch import RankContext
from train.methods import assign_mesh
from train.metrics import Best, Score
from train.recorders.base import Pace, StepRecord
from train.recorders.composite import CompositeRecorder, make_recorder
from train.recorders.metrics_file import MetricsFile
from train.recorders.rank_log import RankLog
from train.task import CLASSIFICATION, LANGUAGE_MODELING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from syncheck.testing import Rank
    from train.result import Result
    from train.settings import Settings
    from train.task import Task

# 6 steps an epoch.
ALONE = replace(SMALL, method="single", max_steps=None, epochs=2, limit_train=200, save_per_rank=False, log_interval=4)
# The fields of each event, in order.
EVENTS = {
    "start": "event time run method world_size task model parameters data samples batch_size shares epochs steps "
    "steps_per_epoch resumed_at launcher torch host device backend config",
    "step": "event time run step epoch lr loss accuracy top5_accuracy samples data_time_s data_time_max_s "
    "batch_time_s batch_time_max_s samples_per_second grad_norm loss_scale peak_memory_bytes",
    "epoch": "event time run epoch step loss accuracy top5_accuracy samples test_loss test_accuracy "
    "test_top5_accuracy test_samples best epoch_time_s test_time_s data_time_s batch_time_s samples_per_second "
    "peak_memory_bytes gpu_utilization gpu_utilization_by_rank",
    "end": "event time run ended steps seconds test_accuracy best_accuracy best_epoch",
}


def run(settings: Settings, ctx: RankContext | None = None) -> Result:
    """Train with the recorders of run.py, but without progress on the terminal."""
    ctx = ctx or RankContext()
    with make_recorder(settings, ctx, "none") as recorder:
        return train(settings, assign_mesh(settings, ctx), recorder)


def records(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file."""
    return read_json_lines(path)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit the files of this process to 4 KiB, to simulate a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_metrics_have_their_fields(tmp_path: Path) -> None:
    """Events have exactly the frozen fields, in order; step records add up to epoch records, also across epochs."""
    result = run(replace(ALONE, log_dir=tmp_path, grad_clip=1.0, eval_every=2))
    lines = records(tmp_path / "single-clip1" / "metrics.jsonl")
    assert list_fields(lines, "event") == ["start", "step", "epoch", "step", "step", "epoch", "end"]
    assert all(list(line) == EVENTS[line["event"]].split() for line in lines)
    steps = find_all(lines, event="step")
    epochs = find_all(lines, event="epoch")
    assert list_fields(steps, "step", "epoch", "samples") == [(4, 1, 128), (8, 2, 128), (12, 2, 128)]
    assert list_fields(epochs, "step", "samples") == [(6, 192), (12, 192)]
    for number in ("loss", "accuracy", "top5_accuracy"):
        complete = sum(e[number] * e["samples"] for e in epochs)
        assert sum(s[number] * s["samples"] for s in steps) == pytest.approx(complete, rel=1e-12)
    assert all(s["batch_time_s"] > s["data_time_s"] > 0 and s["grad_norm"] > 0 for s in steps)
    assert all(1e7 < s["peak_memory_bytes"] < 1e11 for s in (*steps, *epochs))
    assert (epochs[0]["test_accuracy"], epochs[1]["test_accuracy"]) == (None, result.test.accuracy)
    assert result.test.accuracy < epochs[1]["test_top5_accuracy"] == result.test.top5 <= 1
    assert epochs[0]["test_top5_accuracy"] is None
    assert lines[-1]["ended"] == "finished"
    assert (lines[-1]["steps"], lines[-1]["best_accuracy"], lines[-1]["best_epoch"]) == (12, result.test.accuracy, 2)
    assert lines[0]["config"]["batch_size"] == 32


def test_all_fields_are_documented() -> None:
    """docs/running.md names every event and its fields."""
    text = (ROOT / "docs" / "running.md").read_text()
    for event, names in EVENTS.items():
        (line,) = find_texts(text.split("\n- "), start=f"**{event}**")
        assert set(names.split()[3:]) - set(re.findall(r"`(\w+)`", line)) == set(), event


def test_a_later_run_replaces_the_files_and_records_its_failure(tmp_path: Path) -> None:
    """A failed run replaces the earlier files; its log has the traceback, and its metrics end with `failed`."""
    run(replace(ALONE, log_dir=tmp_path))
    settings = replace(ALONE, log_dir=tmp_path, max_steps=5)
    with (  # noqa: PT012 - the recorder must receive the exception
        pytest.raises(RuntimeError, match="planted"),
        make_recorder(settings, RankContext(), "none") as recorder,
    ):
        train(settings, RankContext(), recorder)
        raise RuntimeError("planted\nwith a second line")
    lines = records(tmp_path / "single" / "metrics.jsonl")
    assert list_fields(lines, "event") == ["start", "step", "epoch", "end"]
    assert (lines[-1]["ended"], lines[-1]["steps"]) == ("failed", 5)
    log = (tmp_path / "single" / "rank_0.log").read_text()
    assert log.count("start of single: rank 0 of 1") == 1
    assert "failed after step 5: RuntimeError: planted\n    with a second line\n" in log
    assert "Traceback (most recent call last)" in log


def test_ctrl_c_is_recorded_as_stopped(tmp_path: Path) -> None:
    """After Ctrl-C, the metrics end with `stopped`, and the log has no traceback."""
    settings = replace(ALONE, log_dir=tmp_path, max_steps=2)
    with pytest.raises(KeyboardInterrupt), make_recorder(settings, RankContext(), "none") as recorder:  # noqa: PT012
        train(settings, RankContext(), recorder)
        raise KeyboardInterrupt
    assert records(tmp_path / "single" / "metrics.jsonl")[-1]["ended"] == "stopped"
    assert "Traceback" not in (tmp_path / "single" / "rank_0.log").read_text()


def test_resume_at_truncates_the_metrics(tmp_path: Path) -> None:
    """`resume_at` removes the records of later steps, the end of the earlier run and a partial line."""
    path = tmp_path / "single" / "metrics.jsonl"
    run(replace(ALONE, log_dir=tmp_path))
    with path.open("a") as file:
        file.write('{"event": "step", "st')
    metrics = MetricsFile(path)
    metrics.resume_at(8)
    assert [line.get("step") for line in records(path)] == [None, 4, 6, 8]
    assert metrics.test == records(path)[2]["test_accuracy"]
    metrics.resume_at(3)
    assert list_fields(records(path), "event") == ["start"]
    path.unlink()
    metrics.resume_at(3)  # no error without a file


def test_a_resumed_run_appends_to_its_files(tmp_path: Path) -> None:
    """A resumed run records the same metrics as an uninterrupted run, except for one more start and a shorter interval.

    The first interval after the resume counts only the steps since then.
    """
    settings = replace(TINY, method="single", checkpoint_every=3, log_interval=2)
    complete = replace(settings, out=tmp_path / "a", log_dir=tmp_path / "a")
    run(complete)
    parts = replace(settings, out=tmp_path / "b", log_dir=tmp_path / "b")
    both = CompositeRecorder([make_recorder(parts, RankContext(), "none"), Stops(5)])
    with pytest.raises(Crash), both:
        train(parts, RankContext(), both)
    run(replace(parts, resume=True))
    expected = records(tmp_path / "a" / "single" / "metrics.jsonl")
    resumed = records(tmp_path / "b" / "single" / "metrics.jsonl")
    events = ["start", "step", "start", "step", "epoch", "step", "step", "epoch", "end"]
    assert list_fields(resumed, "event") == events
    assert resumed[2]["resumed_at"] == 3
    for before, after in zip(expected[2:], resumed[3:], strict=True):
        assert (before["event"], before.get("step")) == (after["event"], after.get("step"))
        names = ("test_accuracy", "best", "best_epoch", "best_accuracy", "lr")
        names += ("loss", "samples") if after.get("step") != 4 or after["event"] == "epoch" else ()
        assert all(before.get(name) == after.get(name) for name in names), after
    assert resumed[3]["samples"] == 16  # one step since the resume
    log = (tmp_path / "b" / "single" / "rank_0.log").read_text()
    assert log.index("failed after step 5: Crash") < log.index("resumed after step 3") < log.index("finished")


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If the disk fills up, the run completes with one warning, and only the last line of the metrics may be cut."""
    run(replace(ALONE, log_dir=tmp_path, log_interval=1))
    path = tmp_path / "single" / "metrics.jsonl"
    assert 2000 < path.stat().st_size <= 4096
    *complete, cut = path.read_text().split("\n")
    assert json.loads(complete[0])["event"] == "start"
    assert all(json.loads(line)["run"] == "single" for line in complete)
    assert not cut.endswith("}")
    assert capsys.readouterr().err == (
        f"run.py: warning: cannot write the log {path}: File too large; training continues\n"
    )


def test_an_unwritable_log_is_refused_at_the_start(tmp_path: Path) -> None:
    """If the folder is a file or the device is full, the run is refused with a UserError that names the log."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write the log .*/file/single/rank_0.log: Not a directory"):
        run(replace(ALONE, log_dir=tmp_path / "file"))
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write the log .*metrics.jsonl: No space left on device"):
        run(replace(ALONE, log_dir=tmp_path))


def test_tensorboard_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tensorboard package, the error names the package to install."""
    monkeypatch.setattr("train.recorders.tensorboard.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"^--tensorboard: .*pip install tensorboard"):
        run(replace(ALONE, log_dir=tmp_path, tensorboard=True))


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    """TensorBoard's own reader returns the scalars of the latest run at their steps."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for epochs in (3, 2):
        run(replace(ALONE, log_dir=tmp_path, tensorboard=True, epochs=epochs))
    lines = records(tmp_path / "single" / "metrics.jsonl")
    events = reader.EventAccumulator(str(tmp_path / "single" / "tensorboard"))
    events.Reload()
    for tag, event, name in (("train/loss", "step", "loss"), ("test/accuracy", "epoch", "test_accuracy")):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines if line["event"] == event]
        assert list_fields(events.Scalars(tag), "step", "value") == expected


@pytest.mark.parametrize(("task", "text"), [(CLASSIFICATION, " of 64 "), (LANGUAGE_MODELING, " over 64 ")])
def test_only_a_share_is_of_the_predictions(tmp_path: Path, task: Task, text: str) -> None:
    """An accuracy is of the predictions; another metric, such as the perplexity, is over them."""
    log, score = RankLog(tmp_path / "rank_0.log"), Score(0.5, 0.75, 64, task=task)
    log.open([], append=False)
    log.log(StepRecord(22, 1, 0.05, score, 0.1, 0.1, 0.2, 0.2, 1234.5, None, None, 1, score, Pace(0.1, 0.2, 1)))
    assert f"{score.format(named=True)}{text}predictions; " in log.path.read_text()


@pytest.mark.syncheck(ranks=2)
def test_records_cover_all_ranks_without_changing_the_weights(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Loss and accuracy are weighted by the samples of uneven shares, and logging does not change the weights."""
    settings = replace(SMALL, batch_size=33, max_steps=6)
    shared = syncheck_rank.shared
    run(replace(settings, out=shared / "without"), ctx)
    result = run(replace(settings, out=shared / "with", log_dir=shared / "logs", log_interval=3), ctx)
    without = load(shared / "without" / f"ddp_rank{ctx.rank}.pth")["model"]
    logged = load(shared / "with" / f"ddp_rank{ctx.rank}.pth")["model"]
    assert not list_differing(without, logged)
    lines = records(shared / "logs" / "ddp" / "metrics.jsonl")
    assert (lines[0]["shares"], lines[0]["world_size"], lines[0]["backend"]) == ([17, 16], 2, "gloo")
    steps = find_all(lines, event="step")
    assert list_fields(steps, "samples") == [99, 99]
    assert sum(list_fields(steps, "loss")) / 2 == pytest.approx(result.trained.loss, rel=1e-12)
    assert sum(list_fields(steps, "accuracy")) / 2 == pytest.approx(result.trained.accuracy, rel=1e-12)
    log = (shared / "logs" / "ddp" / f"rank_{ctx.rank}.log").read_text()
    assert f"rank {ctx.rank} of 2" in log
    assert f"of {(51, 48)[ctx.rank]} predictions" in log
    assert f"saved {shared / 'with' / f'ddp_rank{ctx.rank}.pth'}" in log


@pytest.mark.parametrize("method", ["ddp", fsdp("fsdp")])
@pytest.mark.syncheck(ranks=2)
def test_grad_norm_covers_the_whole_gradient(ctx: RankContext, syncheck_rank: Rank, method: str) -> None:
    """The recorded norm equals that of a single process, even if each rank holds only a shard of the gradient."""
    logs = syncheck_rank.shared
    settings = replace(ALONE, model="convnet", max_steps=4, log_dir=logs, grad_clip=1.0)
    run(replace(settings, method=method), ctx)
    if ctx.rank == 0:
        run(settings)
        actual = records(logs / f"{method}-clip1" / "metrics.jsonl")
        expected = records(logs / "single-clip1" / "metrics.jsonl")
        assert actual[1]["grad_norm"] == pytest.approx(expected[1]["grad_norm"], rel=1e-4)
        assert actual[1]["loss"] == pytest.approx(expected[1]["loss"], rel=1e-5)


@pytest.mark.syncheck(ranks=2)
def test_out_of_sync_checks_are_logged(ctx: RankContext, syncheck_rank: Rank) -> None:
    """Every rank's log has one warning with the codes for each out-of-sync check, and no other warnings."""
    for sync_bn, steps in ((False, [2, 4, 5]), (True, [])):
        settings = replace(SMALL, save_per_rank=False, monitor=2, max_steps=5, sync_bn=sync_bn)
        settings = replace(settings, log_dir=syncheck_rank.shared)
        run(settings, ctx)
        log = (settings.log_dir / settings.run / f"rank_{ctx.rank}.log").read_text()
        logged = re.findall(r"warning: step (\d+): the ranks are out of sync: SYN201", log)
        assert [int(step) for step in logged] == steps
        assert log.count("warning") == len(steps)


@pytest.mark.syncheck(ranks=2)
def test_all_ranks_report_a_log_that_one_cannot_write(ctx: RankContext, syncheck_rank: Rank) -> None:
    """If rank 1 cannot open its log, both ranks raise an error that names the rank and the file."""
    folder = syncheck_rank.shared / "ddp"
    folder.mkdir(exist_ok=True)
    (folder / "rank_1.log").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=r"rank 1: cannot write the log .*rank_1.log: Is a directory"):
        run(replace(SMALL, save_per_rank=False, log_dir=syncheck_rank.shared), ctx)


def test_equal_score_does_not_replace_the_best() -> None:
    """Only a higher accuracy replaces the best one, also after the best is saved and restored."""
    best = Best()
    assert [best.update(Score(1.0, accuracy, 8), epoch, 10 * epoch) for epoch, accuracy in ((1, 0.5), (2, 0.75))] == [
        True,
        True,
    ]
    again = Best(**json.loads(json.dumps(vars(best))))
    assert [again.update(Score(0.1, accuracy, 8), 3, 30) for accuracy in (0.5, 0.75)] == [False, False]
    assert vars(again) == {"value": 0.75, "epoch": 2, "step": 20}
