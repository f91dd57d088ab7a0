"""--task: the example of docs/tasks.md, its files and evaluation, and refused tasks and options."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.listings import find_all, read_json_lines
from support.programs import TRAIN
from support.scenarios import run, trained

from train.engine import Job
from train.errors import UserError
from train.evaluate.__main__ import main as evaluate
from train.launch import RankContext
from train.run import main
from train.settings import Settings, check
from train.task import make_task

if TYPE_CHECKING:
    from support.programs import Programs

    from syncheck.testing import Rank

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
EXAMPLE, IMAGE_FOLDER = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
BROKEN = (
    EXAMPLE
    + """
class Single(Sine):
    def load(self, settings):
        return Data(train=torch.rand(8, 2), test=torch.rand(8, 2))

class NoMetrics(Task):
    pass

class MetricNames(Sine):
    metrics = ["rmse"]

class Argument(Sine):
    def __init__(self, size):
        pass

class NoLoad(Task):
    metrics = {"rmse": False}

class Nothing(Sine):
    def load(self, settings):
        pass

class MissingFolder(Sine):
    def load(self, settings):
        import os
        os.scandir("photos/train")

class FileAsFolder(Sine):
    def load(self, settings):
        import os
        os.scandir("unfinished.py")

class NoImages(Sine):
    def load(self, settings):
        raise FileNotFoundError("Found no valid file for the classes blue.\\nSupported extensions are: .jpg")

class Unreadable:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise PermissionError(13, "Permission denied", "0.jpg")

class UnreadableSample(Sine):
    def load(self, settings):
        return Data(train=Unreadable(), test=Unreadable())

class Numbers:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((8,), index / 32), index % 2

class Labels(Sine):
    def load(self, settings):
        return Data(train=Numbers(), test=Numbers())

    def build_model(self, settings, data):
        return nn.Linear(8, 2)

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="sum")

    def count(self, outputs, targets):
        return (outputs.argmax(-1) != targets).sum().double()
"""
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the example to a module in the current folder, and return its name."""
    name = f"tasks_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file."""
    return read_json_lines(path)


def test_the_example_trains(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The example learns; its metrics are printed and recorded, and the best epoch has the smallest error."""
    options = [
        "--task",
        f"{module}:Sine",
        "--epochs",
        "6",
        "--save-best",
        "--log-dir",
        "log",
        "--checkpoint-every",
        "50",
    ]
    assert main(options).code == 0
    assert re.search(r"^single: test rmse 0\.\d+, 6 epochs, 186 steps", capsys.readouterr().out, re.MULTILINE)
    start, *records, end = read_events(Path("log/single/metrics.jsonl"))
    epochs = find_all(records, event="epoch")
    assert (start["task"], start["model"], start["config"]["data"]) == (f"{module}:Sine", None, None)
    assert epochs[0]["test_rmse"] > 2 * epochs[-1]["test_rmse"]
    assert all(0 < epoch["mae"] < epoch["rmse"] for epoch in epochs)
    assert epochs[0]["samples"] == 992
    best = min(epochs, key=lambda epoch: epoch["test_rmse"])
    assert (end["best_rmse"], end["best_epoch"]) == (best["test_rmse"], best["epoch"])
    # The model in the file has the recorded error, and the error is the mean over all test samples.
    job = trained(RankContext(), Settings(task=f"{module}:Sine", max_steps=1))
    job.method.module.load_state_dict(torch.load("ckpts/best/single/rank_0.pth", weights_only=True)["model"])
    x, y = job.loaders.test_batches.dataset[:]
    with torch.no_grad():
        assert (job.method.module(x) - y).square().mean().sqrt().item() == pytest.approx(best["test_rmse"], rel=1e-5)


def test_a_resumed_run_keeps_the_best(module: str) -> None:
    """A run of 6 epochs resumed after 3 ends with the metrics of an uninterrupted run; another task is refused."""
    options = ["--task", f"{module}:Sine", "--epochs", "6", "--schedule", "constant"]
    options += ["--warmup-steps", "5", "--log-dir"]
    assert main([*options, "whole", "--out", "whole"]).code == 0
    assert main([*options, "half", "--max-steps", "93", "--checkpoint-every", "93", "--out", "half"]).code == 0
    assert main([*options, "half", "--checkpoint-every", "93", "--out", "half", "--resume"]).code == 0
    complete = read_events(Path("whole", "single", "metrics.jsonl"))[-1]
    half = read_events(Path("half", "single", "metrics.jsonl"))[-1]
    for key in ("test_rmse", "best_rmse", "best_epoch"):
        assert half[key] == complete[key]
    assert main(["--out", "half", "--resume"]).code == 2


@pytest.mark.slow
def test_two_ranks_and_their_evaluation(module: str, programs: Programs, capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks with loading workers save equal models; train.evaluate scores them only with --task."""
    options = ("--spawn", 2, "--save-per-rank", "--workers", 1, "--task", f"{module}:Sine", "--max-steps", 4)
    assert programs.run(*TRAIN, *options, timeout=120).returncode == 0
    assert evaluate(["ckpts", "--task", f"{module}:Sine"]) == 0
    assert re.search(r"rmse is 0\.\d+ on every rank: weights agree", capsys.readouterr().out)
    assert evaluate(["ckpts"]) == 2
    assert f"trained with --task {module}:Sine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent:Sine", "No module named 'absent'"),
        ("{}:Absent", "has no attribute 'Absent'"),
        ("{}", "cannot be imported"),
        ("{}:nn", "must be a subclass of train.task.Task with metrics"),
        ("{}:NoMetrics", "must be a subclass of train.task.Task with metrics"),
        ("{}:Single", "must be a pair of tensors"),
        (".{}:Sine", "cannot be imported"),
        ("unfinished:Sine", "cannot be imported"),
        ("{}:MetricNames", "metrics is ['rmse']; map "),
        ("{}:Argument", "cannot be built"),
        ("{}:NoLoad", "define its method load"),
        ("{}:Nothing", "load returned NoneType"),
        ("{}:MissingFolder", "No such file or directory: 'photos/train'"),
        ("{}:FileAsFolder", "Not a directory"),
        ("{}:NoImages", "classes blue. Supported extensions"),
        ("{}:UnreadableSample", "Permission denied: '0.jpg'"),
    ],
)
def test_unsuitable_tasks_are_refused(module: str, name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A task that cannot be imported, is no task, or has unsuitable samples is one line and exit code 2."""
    Path("unfinished.py").write_text("class Sine(\n")
    assert main(["--task", name.format(module)]).code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"--task {name.format(module)}: " in error
    assert message in error


@pytest.mark.syncheck(ranks=2)
def test_plain_numbers_as_labels_resume(ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of ddp resumes if the labels of its data set are ints, like those of torchvision's ImageFolder."""
    folder = syncheck_rank.shared / f"code_{ctx.rank}"
    folder.mkdir()
    (folder / "labels_task.py").write_text(BROKEN)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = Settings(
        method="ddp",
        task="labels_task:Labels",
        batch_size=8,
        schedule="constant",
        max_steps=2,
        checkpoint_every=2,
        out=syncheck_rank.shared,
    )
    run(ctx, settings)
    assert Job(replace(settings, max_steps=4, resume=True), ctx).position.step == 2


def test_replaced_options_are_refused() -> None:
    """Options of the built-in model and data are refused with --task, and an unlimited count too large for it."""
    for name, value in {"model": "convnet", "data": "text", "width": 8, "image_size": 8, "augment": "basic"}.items():
        with pytest.raises(UserError, match=f"^--{name.replace('_', '-')}: not with --task"):
            check(Settings(task="a:B", **{name: value}), 1)
    check(Settings(task="a:B", limit_train=8), 1)


def test_perplexity_is_finite_in_strange_runs() -> None:
    """The perplexity is the exponential of the loss, and does not raise an error for a diverged run."""
    task = make_task(Settings(data="text", model="gpt-tiny"))
    expected = {"perplexity": pytest.approx(7.389, rel=1e-3), "accuracy": 0.5, "top5_accuracy": 0.75}
    assert task.compute(2.0, (0.5, 0.75)) == expected
    assert task.compute(float("inf"), (0.0, 0.0))["perplexity"] == float("inf")
    assert task.compute(1e6, (0.0, 0.0))["perplexity"] > 1e5


@pytest.mark.slow
def test_a_folder_of_images_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second example of the page reads images by class with torchvision, and learns to separate two colors."""
    pytest.importorskip("torchvision", exc_type=ImportError)
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 16), ("val", 4)):
        for color in ("red", "blue"):
            folder = tmp_path / "photos" / part / color
            folder.mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (70 + i, 64), color).save(folder / f"{i}.jpg")
    name = f"photos_{abs(hash(tmp_path))}"
    # A smaller network and smaller images take seconds.
    small = IMAGE_FOLDER.replace('SIZE = "photos", 64', 'SIZE = "photos", 16').replace("resnet18", "resnet8")
    (tmp_path / f"{name}.py").write_text(small)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["--task", f"{name}:Photos", "--epochs", "3", "--batch-size", "8", "--log-dir", "log"]).code == 0
    _, *records, _ = read_events(Path("log/single/metrics.jsonl"))
    assert find_all(records, event="epoch")[-1]["accuracy"] == 1
