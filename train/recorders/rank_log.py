"""A log file per rank with its environment, settings, metrics, saved files and end."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from train.errors import Stopped, explain_os_error
from train.launch.signals import print_line
from train.recorders.base import EpochRecord, Recorder, Start, StepRecord
from train.settings import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class LogFileHandler(logging.FileHandler):
    """A FileHandler that remembers the first error of the file system, such as a full disk."""

    error: OSError | None = None

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Remember the error of a failed write."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self.error = self.error or error
        else:
            super().handleError(record)


class LogFile(Recorder):
    """Base class of recorders that append lines to a file with `logging`.

    Each line is flushed, so that lines survive if the process is killed. If a write fails, for example on a full disk,
    one warning is printed on stderr, and the run continues.

    launcher: the name of the launcher, None if unknown.
    """

    formatter = logging.Formatter()

    def __init__(self, path: Path, launcher: str | None = None) -> None:
        self.path, self.launcher = path, launcher
        # Without a logger, because a program's configuration of logging must neither receive nor drop these lines.
        self.handler: LogFileHandler | None = None
        self.steps = 0
        self.warned = False

    def open(self, lines: Sequence[str], *, append: bool) -> None:
        """Create the folder and the file, and write the first lines. append: keep the existing contents.

        Raises UserError, because nothing is lost yet.
        """
        mode = "a" if append else "w"
        with explain_os_error(f"cannot write the log {self.path}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handler = LogFileHandler(self.path, mode, encoding="utf-8", errors="backslashreplace")
            handler.setFormatter(self.formatter)
            for line in lines:
                handler.handle(logging.makeLogRecord({"msg": line}))
            if handler.error is not None:
                raise handler.error
        self.handler = handler

    def write(self, line: str) -> None:
        """Write a line if the file is open. The first failure prints a warning."""
        if self.handler is None:
            return
        self.handler.handle(logging.makeLogRecord({"msg": line}))
        if self.handler.error is not None and not self.warned:
            self.warned = True
            warn_lost(self.path, self.handler.error)

    def step(self, step: int, *_: object) -> None:
        """Remember the number of steps."""
        self.steps = step

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Close the file."""
        if self.handler is not None:
            with suppress(OSError):  # network file systems may report failures on close
                self.handler.close()
            self.handler = None


def classify_ending(error: BaseException | None) -> str:
    """Return finished, stopped (by a signal) or failed, given the exception that ended the run."""
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, (KeyboardInterrupt, Stopped)) else "failed"


def warn_lost(path: Path, error: OSError) -> None:
    """Print a warning that the log is incomplete."""
    print_line(f"warning: cannot write the log {path}: {error.strerror}; training continues")


class RankLog(LogFile):
    """Writes a line per event with date and time (UTC). Used on every rank."""

    formatter = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
    formatter.converter = time.gmtime

    def start(self, start: Start) -> None:
        """Open the file, and write the environment, the settings and the plan. Raises UserError."""
        s, ctx, plan = start.settings, start.ctx, start.plan
        options = ", ".join(f"{k}={v}" for k, v in vars(s).items() if v != getattr(DEFAULT, k))
        process = f"process {os.getpid()} on {socket.gethostname()} (node {ctx.node}, local rank {ctx.local_rank})"
        versions = f"python {platform.python_version()}, torch {torch.__version__}"
        device = f"device {device_name(ctx.device)}, backend {ctx.backend or 'none'}, {torch.get_num_threads()} threads"
        model, data = s.model, s.data
        if s.task:
            model, data = "the model", f"--task {s.task}"
        task = f"{model} with {start.parameters} parameters on {start.samples} samples of {data}"
        share = f"{start.shares[ctx.mesh.data_rank]} of {sum(start.shares)} samples per step on this rank"
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
        self.open(lines, append=start.resumed_at is not None)

    def log(self, record: StepRecord) -> None:
        """Write the metrics of this rank."""
        score, pace = record.own, record.own_pace
        # Only a share is of the predictions.
        preposition = "of" if score.main[0] == "accuracy" else "over"
        self.note(
            f"step {record.step}, epoch {record.epoch}: own loss {score.loss:.4f}, {score.format(named=True)} "
            f"{preposition} {score.samples} predictions; lr {record.lr:.4g}; data {1000 * pace.data_time_s:.2f} ms, "
            f"batch {1000 * pace.batch_time_s:.2f} ms per step; memory {pace.peak_memory_bytes / 2**20:.0f} MiB"
        )

    def epoch(self, record: EpochRecord) -> None:
        """Write the scores over all ranks."""
        test = "not evaluated"
        if record.test is not None:
            test = f"test loss {record.test.loss:.4f}, {record.test.format(named=True)}"
            if record.best:
                test += ", best so far"
        self.note(
            f"end of epoch {record.epoch}, step {record.step}, all ranks: loss {record.trained.loss:.4f}, "
            f"{record.trained.format(named=True)}; {test}; {record.epoch_time_s:.1f} s + {record.test_time_s:.1f} s"
        )

    def note(self, text: str) -> None:
        """Write a line; further lines of the text are indented."""
        self.write(text.rstrip().replace("\n", "\n    "))

    def close(self, error: BaseException | None) -> None:
        """Write how the run ended, with the traceback of a failure."""
        ended = classify_ending(error)
        text = f"{ended} after step {self.steps}"
        if error is not None:
            text += f": {type(error).__name__}: {error}"
        self.note(text)
        if ended == "failed":
            self.note("".join(traceback.format_exception(error)))
        super().close(error)


def device_name(device: torch.device) -> str:
    """Return "cpu" or the name of the GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(device)
