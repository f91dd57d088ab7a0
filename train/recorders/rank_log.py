"""A log file per rank with its environment, settings, metrics, saved files and end."""

from __future__ import annotations

import os
import platform
import socket
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from train.errors import Stopped, UserError
from train.launch.signals import print_line
from train.recorders.base import EpochRecord, Recorder, Start, StepRecord
from train.settings import DEFAULT

if TYPE_CHECKING:
    from pathlib import Path


class LogFile(Recorder):
    """Base class of recorders that append lines to a file.

    Each line is a single write, so that lines survive if the process is killed. If a write fails, for example on a full
    disk, the partial line is removed and one warning is printed on stderr. The run continues, and the next line is
    tried again. launcher: the name of the launcher, None if unknown.
    """

    def __init__(self, path: Path, launcher: str | None = None) -> None:
        self.path, self.launcher = path, launcher
        self.file: int | None = None
        self.size = self.steps = 0
        self.warned = False

    def open(self, text: str, *, append: bool) -> None:
        """Create the folder and the file, and write the first lines. append: keep the existing contents.

        Raises UserError, because nothing is lost yet.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | (0 if append else os.O_TRUNC)
            self.file = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
            self.size = os.lseek(self.file, 0, os.SEEK_END)
            self._append(self.file, text)
        except OSError as error:
            raise UserError(f"cannot write the log {self.path}: {error.strerror}") from error

    def write(self, text: str) -> None:
        """Write whole lines if the file is open. The first failure prints a warning."""
        try:
            if self.file is not None:
                self._append(self.file, text)
        except OSError as error:
            if not self.warned:
                self.warned = True
                warn_lost(self.path, error)

    def _append(self, file: int, text: str) -> None:
        content = text.encode()
        try:
            done = 0
            while done < len(content):  # a nearly full disk accepts a part
                done += os.pwrite(file, content[done:], self.size + done)
            self.size += done
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, self.size)
            raise

    def step(self, step: int, *_: object) -> None:
        """Remember the number of steps."""
        self.steps = step

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Close the file."""
        if self.file is not None:
            with suppress(OSError):  # network file systems may report failures on close
                os.close(self.file)
            self.file = None


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

    def start(self, start: Start) -> None:
        """Open the file, and write the environment, the settings and the plan. Raises UserError."""
        s, ctx, plan = start.settings, start.ctx, start.plan
        options = ", ".join(f"{k}={v}" for k, v in vars(s).items() if v != getattr(DEFAULT, k))
        process = f"process {os.getpid()} on {socket.gethostname()} (node {ctx.node}, local rank {ctx.local_rank})"
        versions = f"python {platform.python_version()}, torch {torch.__version__}"
        device = f"device {device_name(ctx.device)}, backend {ctx.backend or 'none'}, {torch.get_num_threads()} threads"
        of = ("the model", f"--task {s.task}") if s.task else (s.model, s.data)
        task = f"{of[0]} with {start.parameters} parameters on {start.samples} samples of {of[1]}"
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
        self.open("".join(map(_add_time, lines)), append=start.resumed_at is not None)

    def log(self, record: StepRecord) -> None:
        """Write the metrics of this rank."""
        own, pace = record.own, record.own_pace
        of = "of" if own.main[0] == "accuracy" else "over"  # only a share is of the predictions
        self.note(
            f"step {record.step}, epoch {record.epoch}: own loss {own.loss:.4f}, {own.format(named=True)} {of} "
            f"{own.samples} predictions; lr {record.lr:.4g}; data {1000 * pace.data_time_s:.2f} ms, "
            f"batch {1000 * pace.batch_time_s:.2f} ms per step; memory {pace.peak_memory_bytes / 2**20:.0f} MiB"
        )

    def epoch(self, record: EpochRecord) -> None:
        """Write the scores over all ranks."""
        test = "not evaluated"
        if record.test is not None:
            test = f"test loss {record.test.loss:.4f}, {record.test.format(named=True)}"
            test += ", best so far" if record.best else ""
        self.note(
            f"end of epoch {record.epoch}, step {record.step}, all ranks: loss {record.trained.loss:.4f}, "
            f"{record.trained.format(named=True)}; {test}; {record.epoch_time_s:.1f} s + {record.test_time_s:.1f} s"
        )

    def note(self, text: str) -> None:
        """Write a line."""
        self.write(_add_time(text))

    def close(self, error: BaseException | None) -> None:
        """Write how the run ended, with the traceback of a failure."""
        ended = classify_ending(error)
        self.note(f"{ended} after step {self.steps}" + (f": {type(error).__name__}: {error}" if error else ""))
        if ended == "failed":
            self.note("".join(traceback.format_exception(error)))
        super().close(error)


def _add_time(text: str) -> str:
    """Return the text with a time stamp; lines after the first are indented."""
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()) + text.rstrip().replace("\n", "\n    ") + "\n"


def device_name(device: torch.device) -> str:
    """Return "cpu" or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
