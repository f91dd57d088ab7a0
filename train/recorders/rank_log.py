"""The log of one rank, for people: who it is, its own numbers, what it saved, how it ended."""

from __future__ import annotations

import os
import platform
import socket
import time
import traceback
from typing import TYPE_CHECKING

import torch

from train.recorders.base import EpochRecord, Recorder, Start, StepRecord, how_it_ended
from train.recorders.line_file import LineFile
from train.recorders.metrics_file import device_name
from train.settings import DEFAULT

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class RankLog(Recorder):
    """One line for each thing that happens, with date and time (UTC). On every rank.

    path: of the file. launcher: what started the run, or None where nobody knows.
    """

    def __init__(self, path: Path, launcher: str | None = None) -> None:
        self.path, self.launcher = path, launcher
        self.file: LineFile | None = None
        self.steps = 0

    def start(self, start: Start) -> None:
        """Open the file and say who this is. Raises UserError."""
        s, ctx, plan = start.settings, start.ctx, start.plan
        self.file = LineFile(self.path, append=start.resumed_at is not None)
        options = ", ".join(f"{k}={v}" for k, v in vars(s).items() if v != getattr(DEFAULT, k))
        place = f"process {os.getpid()} on {socket.gethostname()} (node {ctx.node}, local rank {ctx.local_rank})"
        versions = f"python {platform.python_version()}, torch {torch.__version__}"
        device = f"device {device_name(ctx.device)}, backend {ctx.backend or 'none'}, {torch.get_num_threads()} threads"
        task = f"{s.model} of {start.parameters} parameters on {start.samples} samples of {s.data}"
        share = f"{start.shares[ctx.rank]} samples a step of {sum(start.shares)} over all ranks"
        lines = [
            f"start of {plan.run}: rank {ctx.rank} of {ctx.world_size}, {place}, launcher {self.launcher or 'unknown'}",
            f"{versions}, {device}",
            f"settings other than the defaults: {options or 'none'}",
            f"{task}: {plan.epochs} epochs, {plan.steps} steps",
            f"{share}; learning rate up to {start.peak_lr:g}",
        ]
        if start.resumed_at is not None:
            lines.append(f"resumed after step {start.resumed_at}")
        self.file.write_first("".join(map(_dated, lines)))

    def step(self, step: int, *_: object) -> None:
        """Count the steps."""
        self.steps = step

    def log(self, record: StepRecord) -> None:
        """Write this rank's own numbers."""
        own, pace = record.own, record.own_pace
        self.note(
            f"step {record.step}, epoch {record.epoch}: own loss {own.loss:.4f}, accuracy {own.accuracy:.1%} of "
            f"{own.samples} samples; lr {record.lr:.4g}; data {1000 * pace.data_time_s:.2f} ms, "
            f"batch {1000 * pace.batch_time_s:.2f} ms a step; memory {pace.peak_memory_bytes / 2**20:.0f} MiB"
        )

    def epoch(self, record: EpochRecord) -> None:
        """Write all ranks' scores."""
        test = "not evaluated"
        if record.test is not None:
            test = f"test loss {record.test.loss:.4f}, accuracy {record.test.accuracy:.1%}"
            test += ", the best so far" if record.best else ""
        self.note(
            f"end of epoch {record.epoch}, step {record.step}, all ranks: loss {record.trained.loss:.4f}, accuracy "
            f"{record.trained.accuracy:.1%}; {test}; {record.train_time_s:.1f} s + {record.test_time_s:.1f} s"
        )

    def note(self, text: str) -> None:
        """Write a line."""
        if self.file is not None:
            self.file.write(_dated(text))

    def warn(self, text: str) -> None:
        """Write a line that can be searched for."""
        self.note(f"warning: {text}")

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say how it ended, with the traceback of what ended it."""
        if self.file is None:
            return
        ended = how_it_ended(value)
        self.note(f"{ended} after step {self.steps}" + (f": {type(value).__name__}: {value}" if value else ""))
        if ended == "failed":
            self.note("".join(traceback.format_exception(value)))
        self.file.close()


def _dated(text: str) -> str:
    """Write a line with the time; what has more than one line is indented below it."""
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()) + text.rstrip().replace("\n", "\n    ") + "\n"
