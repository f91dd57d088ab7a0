"""python -m train.plot: the curves, the names of the runs, and its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from train.plot import draw, main, name_runs, read_records
from train.run import main as train_main

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_launcher")
pytest.importorskip("matplotlib")
START = {"event": "start", "run": "ddp", "steps_per_epoch": 4}


def write(path: str, *records: dict[str, Any]) -> Path:
    """Write records of a run as JSON lines."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"run": "ddp", **record}) + "\n" for record in records))
    return file


def lines_of(*paths: Path) -> list[list[tuple[list[float], list[float], str]]]:
    """Return positions, values and line styles of the curves in both diagrams."""
    figure = draw([read_records(path) for path in paths], [str(path) for path in paths])
    return [
        [
            ([*map(float, line.get_xdata())], [*map(float, line.get_ydata())], line.get_linestyle())
            for line in axes.lines
        ]
        for axes in figure.axes
    ]


def test_curves() -> None:
    """Training is drawn at its records, the test set at evaluated epochs, in epochs; null leaves a gap in training."""
    steps = [{"event": "step", "step": step, "loss": 1.0 / step, "accuracy": step / 8} for step in (2, 4, 6, 8)]
    steps[1]["loss"] = None  # type: ignore[assignment]
    epochs: list[dict[str, Any]] = [
        {"event": "epoch", "step": 4, "loss": 0.7, "accuracy": 0.3, "test_loss": None, "test_accuracy": None},
        {"event": "epoch", "step": 8, "loss": 0.4, "accuracy": 0.6, "test_loss": 0.5, "test_accuracy": 0.75},
    ]
    loss, accuracy = lines_of(write("a.jsonl", START, *steps, *epochs), write("b.jsonl", START, *epochs))
    assert [line[2] for line in loss] == [line[2] for line in accuracy] == ["-", "--"] * 2
    assert loss[0][0] == [0.5, 1.0, 1.5, 2.0]
    assert [loss[0][1][0], *loss[0][1][2:]] == [1 / 2, 1 / 6, 1 / 8]
    assert math.isnan(loss[0][1][1])
    assert loss[1][:2] == ([2.0], [0.5])
    assert accuracy[1][:2] == ([2.0], [0.75])
    assert loss[2][:2] == ([1.0, 2.0], [0.7, 0.4])  # without records of steps, those of epochs
    assert accuracy[0][1] == [0.25, 0.5, 0.75, 1.0]


def test_runs_without_accuracy_have_one_diagram() -> None:
    """The diagram of the accuracy is left out if no run has an accuracy, as with a task of other metrics."""
    epoch = {"event": "epoch", "step": 4, "loss": 0.7, "rmse": 0.3, "test_loss": 0.5, "test_rmse": 0.2}
    (loss,) = lines_of(write("a.jsonl", START, epoch))
    assert [line[:2] for line in loss] == [([1.0], [0.7]), ([1.0], [0.5])]
    assert len(lines_of(write("a.jsonl", START, epoch), write("b.jsonl", START, epoch | {"accuracy": 0.5}))) == 2


def test_runs_of_one_name_are_distinguished_by_path() -> None:
    """The legend names each run, with its path if another run has the same name."""
    paths = [Path("a/metrics.jsonl"), Path("b/metrics.jsonl"), Path("c/metrics.jsonl")]
    names = name_runs(paths, [[{"run": "ddp"}], [{"run": "fsdp"}], [{"run": "ddp"}]])
    assert names == ["ddp (a/metrics.jsonl)", "fsdp", "ddp (c/metrics.jsonl)"]


@pytest.mark.parametrize(("name", "head"), [("curves.svg", b"<?xml"), ("metrics.png", b"\x89PNG")])
def test_a_picture_of_real_runs(capsys: pytest.CaptureFixture[str], name: str, head: bytes) -> None:
    """The records of two runs make a picture, an SVG or a PNG file; a name with dollar signs is no formula."""
    for folder in ("$a$", "$b_$"):
        assert train_main(f"--width 4 --limit-train 64 --epochs 2 --progress none --log-dir {folder}".split()) == 0
    capsys.readouterr()
    output = [] if name == "metrics.png" else ["-o", name]
    assert main(["$a$/single/metrics.jsonl", "$b_$/single/metrics.jsonl", *output]) == 0
    assert capsys.readouterr() == (f"wrote {name}\n", "")
    picture = Path(name).read_bytes()
    assert picture.startswith(head)
    assert len(picture) > 5000


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: None, "none.jsonl", "none.jsonl: cannot be read: No such file or directory; pass metrics.jsonl files"),
        (lambda: write("a.jsonl", {"event": "step", "step": 1}), "a.jsonl", "a.jsonl: has no event start; pass DIR/"),
        (lambda: Path("a.jsonl").write_bytes(b"\x89PNG\n[1]\n7\n{"), "a.jsonl", "a.jsonl: has no event start; "),
        (lambda: write("a.jsonl", START | {"steps_per_epoch": 0}), "a.jsonl", "a.jsonl: has no event start; "),
        (lambda: write("a.jsonl", START), "a.jsonl", "a.jsonl: has no step and no epoch yet; wait, "),
        (lambda: None, "a.jsonl -o a.gif", "--output a.gif: must be a .png or .svg file"),
        (lambda: None, "", "the following arguments are required: metrics.jsonl"),
        (
            lambda: write("a.jsonl", START, {"event": "epoch", "step": 4}),
            "a.jsonl -o /dev/null/a.svg",
            "--output /dev/null/a.svg: cannot be written: Not a directory",
        ),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], make: Callable[[], object], arguments: str, message: str
) -> None:
    """A file that is missing, different or without records, and a bad --output, exit with 2 and one line."""
    make()
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"plot.py: {message}")
    assert captured.err.count("\n") == 1
