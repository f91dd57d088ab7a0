"""Sample measurements for the benchmark's tests: rows, and lines of metrics.jsonl."""

from __future__ import annotations

from typing import Any

from train.bench.cases import CASES
from train.bench.runs import Row, Timing

MACHINE: dict[str, Any] = {
    "cpu": "A processor",
    "cores": 2,
    "gpus": [],
    "python": "3.11",
    "torch": "2.15",
    "threads": 1,
    "rounds": 2,
    "options": ["--model", "resnet8"],
}


def row(name: str, *epochs: float, problem: str = "", gpus: tuple[float, ...] = ()) -> Row:
    """Return a case's row, with a run of 10 steps and 320 samples for each epoch time. gpus: their utilization."""
    timings = [Timing(3.0, (t,), 10, 320, 0.5, 10**8, 9.0, gpus) for t in epochs]
    return Row(CASES[name], 2, "resnet8", "digits", timings, problem=problem)


def record(event: str, **values: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    if event == "start":
        values = {"model": "resnet8", "data": "digits", "samples": 340, "batch_size": 32}
    return {"event": event, "time": 1000.0, "run": "ddp", **values}


def epoch(number: int, seconds: float, accuracy: float = 0.1, memory: int = 1) -> dict[str, Any]:
    """Return an epoch's line of metrics.jsonl: 10 steps, 320 samples."""
    values = {"epoch_time_s": seconds, "samples": 320, "test_accuracy": accuracy, "peak_memory_bytes": memory}
    values["gpu_utilization_by_rank"] = [90.0 + number, 10.0]
    return record("epoch", epoch=number, step=10 * number, **values)
