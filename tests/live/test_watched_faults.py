"""The faults of the trainer under `syncheck watch`: each is named on its ranks, at its step, for 2 to 4 ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.started import CLONE, Processes

import syncheck
from train.faults import FAULTS

# In the middle of the run, counted from 1; two epochs of 11 steps.
HALF = 11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "ranks", "code", "step", "suspects"),
    [
        ("same-batch", 4, "SYN401", 1, [0, 1, 2, 3]),
        ("overlap", 2, "SYN402", 3, [0, 1]),
        ("no-set-epoch", 3, "SYN403", 12, [0, 1, 2]),
        ("rng-shared", 2, "SYN404", 1, [0, 1]),
        # No reduction gives its step a number of its own.
        ("grad-not-reduced-once", 4, "SYN410", HALF - 1, [0, 1, 2, 3]),
        ("forward-through-module", 2, "SYN410", 1, [0, 1]),
        ("clip-on-one-rank", 3, "SYN410", 1, [2]),
        ("skipped-step", 2, "SYN214", HALF, [1]),
        ("other-learning-rate", 4, "SYN107", 1, [3]),
        ("bit-flip-weight", 3, "SYN411", 16, [2]),
    ],
)
def test_faults_of_the_trainer_are_named(
    tmp_path: Path, fault: str, ranks: int, code: str, step: int, suspects: list[int]
) -> None:
    """The first finding of a witness has the code, the number of the reduction, and the ranks."""
    rows = watch_fault(tmp_path, fault, ranks)
    first = next(row for row in rows if row["event"] == "witness")
    assert (first["code"], first["step"], first["ranks"]) == (code, step, suspects)
    assert FAULTS[fault].in_files == (code < "SYN401" or code > "SYN404")


@pytest.mark.slow
def test_a_model_that_is_wrapped_again_is_compared(tmp_path: Path) -> None:
    """The fault wraps the model a second time, and only the second wrapper reduces: its reductions count."""
    rows = watch_fault(tmp_path, "frozen-not-broadcast", 2)
    checks = [row for row in rows if row["event"] == "check"]
    assert [finding["code"] for finding in checks[0]["findings"]] == ["SYN218"]


@pytest.mark.slow
def test_the_finding_of_a_witness_can_be_allowed(tmp_path: Path) -> None:
    """The finding does not count, and replicas are compared up to the end."""
    rows = watch_fault(tmp_path, "same-batch", 2, "--allow", "syn401")
    assert {row["allowed"] for row in rows if row["event"] == "witness"} == {True}
    assert {row["verdict"] for row in rows if row["event"] == "check"} == {"in_sync"}


def watch_fault(folder: Path, fault: str, ranks: int, *watch_options: str) -> list[dict[str, Any]]:
    """Run the trainer with a fault under `syncheck watch`; return the events."""
    model = "mnist_convnet" if fault == "rng-shared" else "resnet8"
    options = ["--spawn", str(ranks), "--fault", fault, "--model", model, "--width", "8", "--batch-size", "128"]
    options += ["--epochs", "2", "--optimizer", "adamw", "--out", str(folder / "ckpts")]
    if model == "resnet8":
        options.append("--sync-bn")
    processes = Processes(folder)
    watch = ["-m", "syncheck", "watch", "--events", "events.jsonl", *watch_options]
    script = Path(syncheck.__file__).parents[1] / "train" / "run.py"
    process = processes.start(sys.executable, *watch, script, *options, PYTHONPATH=CLONE)
    try:
        _, errors = process.communicate(timeout=110)
    finally:
        processes.kill()
    assert process.returncode == 0, errors
    return [json.loads(row) for row in (folder / "events.jsonl").read_text().splitlines()]
