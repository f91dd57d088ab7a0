"""Metrics as JSON lines; docs/running.md documents the fields of each event."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.checkpoint_files import write_atomic
from train.errors import explain_os_error
from train.metrics import replace_nonfinite
from train.recorders.rank_log import LogFile, classify_ending, device_name

if TYPE_CHECKING:
    from pathlib import Path

    from train.metrics import Score
    from train.recorders.base import EpochRecord, Start, StepRecord

# Fields of records for other recorders.
NOT_WRITTEN = ("own", "own_pace", "step_time_s")


class MetricsFile(LogFile):
    """Writes a JSON object per line at once, so that other programs can follow the file. Used on rank 0."""

    def __init__(self, path: Path, launcher: str | None = None) -> None:
        super().__init__(path, launcher)
        self.run, self.metric, self.since = "", "accuracy", time.perf_counter()
        self.test: float | None = None
        self.best: tuple[float | None, int | None] = None, None

    def resume_at(self, step: int) -> None:
        """Remove the records after this optimizer step, and the record of the end.

        If an epoch ends with the step, its record is removed too, because the epoch is evaluated and recorded again.
        Partial lines of a crashed run are removed. Raises UserError if the file cannot be read or written.
        """
        kept_lines = []
        with explain_os_error(f"cannot read the log {self.path}"):
            if not self.path.exists():
                return
            lines = self.path.read_text(errors="replace").splitlines()
        for line in lines:
            try:
                record = json.loads(line)
                # the event "end" has no step
                if record["event"] != "start" and record["step"] + (record["event"] == "epoch") > step:
                    continue
            except (ValueError, TypeError, KeyError):
                continue
            kept_lines.append(line)
            self._remember_scores(record)
        write_atomic(self.path, "".join(f"{line}\n" for line in kept_lines).encode())

    def _remember_scores(self, record: dict[str, Any]) -> None:
        if (test := record.get(f"test_{self.metric}")) is not None and record["event"] == "epoch":
            self.test = test
            if record["best"]:
                self.best = test, record["epoch"]

    def start(self, start: Start) -> None:
        """Open the file and write the event "start". Raises UserError."""
        s, ctx, plan, self.metric = start.settings, start.ctx, start.plan, start.metric
        if start.resumed_at is not None:
            self.resume_at(start.resumed_at)
            self.steps = start.resumed_at
        self.run, self.since = plan.run, time.perf_counter()
        # A user's task replaces model and data by None.
        config = s.config(ctx.world_size)
        record = {
            "method": s.method,
            "world_size": ctx.world_size,
            "task": s.task,
            "model": config["model"],
            "parameters": start.parameters,
            "data": config["data"],
            "samples": start.samples,
            "batch_size": s.batch_size,
            "shares": start.shares,
            "epochs": plan.epochs,
            "steps": plan.steps,
            "steps_per_epoch": plan.steps_per_epoch,
            "resumed_at": start.resumed_at,
            "launcher": self.launcher,
            "torch": torch.__version__,
            "host": socket.gethostname(),
            "device": device_name(ctx.device),
            "backend": ctx.backend,
            "config": config,
        }
        self.open([self._format_line({"event": "start", **record})], append=start.resumed_at is not None)

    def log(self, record: StepRecord) -> None:
        """Write the event "step"."""
        self._write({"event": "step", **_list_fields(record)})

    def epoch(self, record: EpochRecord) -> None:
        """Write the event "epoch"."""
        self._write({"event": "epoch", **_list_fields(record)})

    def close(self, error: BaseException | None) -> None:
        """Write the event "end"."""
        best, epoch = self.best
        self._write(
            {
                "event": "end",
                "ended": classify_ending(error),
                "steps": self.steps,
                "seconds": time.perf_counter() - self.since,
                f"test_{self.metric}": self.test,
                f"best_{self.metric}": best,
                "best_epoch": epoch,
            }
        )
        super().close(error)

    def _write(self, record: dict[str, Any]) -> None:
        self._remember_scores(record)
        self.write(self._format_line(record))

    def _format_line(self, record: dict[str, Any]) -> str:
        complete = {"event": record["event"], "time": time.time(), "run": self.run, **record}
        return json.dumps(replace_nonfinite(complete), allow_nan=False)


def _list_fields(record: StepRecord | EpochRecord) -> dict[str, Any]:
    """Return the fields of an event; a score becomes its loss, its metrics and its number of samples."""
    fields: dict[str, Any] = {}
    for name, value in vars(record).items():
        if name == "trained":
            fields |= _list_numbers(value)
        elif name == "test":
            # Without an evaluation the numbers are null.
            numbers = dict.fromkeys(_list_numbers(record.trained))
            if value is not None:
                numbers = _list_numbers(value)
            for key, number in numbers.items():
                fields[f"test_{key}"] = number
        elif name not in NOT_WRITTEN:
            fields[name] = value
    return fields


def _list_numbers(score: Score) -> dict[str, Any]:
    return {"loss": score.loss, **score.metrics, "samples": score.samples}
