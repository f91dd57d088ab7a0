"""A log file per rank with its environment, settings, metrics, saved files and end."""

from __future__ import annotations

import os
import platform
import socket
import time
import traceback
from typing import TYPE_CHECKING

import torch

from train.recorders.base import EpochRecord, Recorder, Start, StepRecord, classify_ending
from train.recorders.line_file import LineFile
from train.recorders.metrics_file import device_name
from train.settings import DEFAULT

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class RankLog(Recorder):
    """Writes a line per event with date and time (UTC). Used on every rank.

    launcher: the name of the launcher, None if unknown.
    """

    def __init__(self, path: Path, launcher: str | None = None) -> None:
        self.path, self.launcher = path, launcher
        self.file: LineFile | None = None
        self.steps = 0

    def start(self, start: Start) -> None:
        """Open the file, and write the environment, the settings and the plan. Raises UserError."""
        s, ctx, plan = start.settings, start.ctx, start.plan
        self.file = LineFile(self.path, append=start.resumed_at is not None)
        options = ", ".join(f"{k}={v}" for k, v in vars(s).items() if v != getattr(DEFAULT, k))
        process = f"process {os.getpid()} on {socket.gethostname()} (node {ctx.node}, local rank {ctx.local_rank})"
        versions = f"python {platform.python_version()}, torch {torch.__version__}"
        device = f"device {device_name(ctx.device)}, backend {ctx.backend or 'none'}, {torch.get_num_threads()} threads"
        task = f"{s.model} with {start.parameters} parameters on {start.samples} samples of {s.data}"
        share = f"{start.shares[ctx.rank]} of {sum(start.shares)} samples per step on this rank"
        launcher = self.launcher or "unknown"
        lines = [
            f"start of {plan.run}: rank {ctx.rank} of {ctx.world_size}, {process}, launcher {launcher}",
            f"{versions}, {device}",
            f"non-default settings: {options or 'none'}",
            f"{task}: {plan.epochs} epochs, {plan.steps} steps",
            f"{share}; peak learning rate {start.peak_lr:g}",
        ]
        if start.resumed_at is not None:
            lines.append(f"resumed after step {start.resumed_at}")
        self.file.write_first("".join(map(_add_time, lines)))

    def step(self, step: int, *_: object) -> None:
        """Remember the number of steps."""
        self.steps = step

    def log(self, record: StepRecord) -> None:
        """Write the metrics of this rank."""
        own, pace = record.own, record.own_pace
        self.note(
            f"step {record.step}, epoch {record.epoch}: own loss {own.loss:.4f}, accuracy {own.accuracy:.1%} of "
            f"{own.samples} samples; lr {record.lr:.4g}; data {1000 * pace.data_time_s:.2f} ms, "
            f"batch {1000 * pace.batch_time_s:.2f} ms per step; memory {pace.peak_memory_bytes / 2**20:.0f} MiB"
        )

    def epoch(self, record: EpochRecord) -> None:
        """Write the scores over all ranks."""
        test = "not evaluated"
        if record.test is not None:
            test = f"test loss {record.test.loss:.4f}, accuracy {record.test.accuracy:.1%}"
            test += ", best so far" if record.best else ""
        self.note(
            f"end of epoch {record.epoch}, step {record.step}, all ranks: loss {record.trained.loss:.4f}, accuracy "
            f"{record.trained.accuracy:.1%}; {test}; {record.train_time_s:.1f} s + {record.test_time_s:.1f} s"
        )

    def note(self, text: str) -> None:
        """Write a line."""
        if self.file is not None:
            self.file.write(_add_time(text))

    def warn(self, text: str) -> None:
        """Write a line with the prefix "warning: "."""
        self.note(f"warning: {text}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write how the run ended, with the traceback of a failure."""
        if self.file is None:
            return
        ended = classify_ending(value)
        self.note(f"{ended} after step {self.steps}" + (f": {type(value).__name__}: {value}" if value else ""))
        if ended == "failed":
            self.note("".join(traceback.format_exception(value)))
        self.file.close()


def _add_time(text: str) -> str:
    """Return the text with a time stamp; lines after the first are indented."""
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()) + text.rstrip().replace("\n", "\n    ") + "\n"
