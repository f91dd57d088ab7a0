"""Metrics for TensorBoard: https://docs.pytorch.org/docs/stable/tensorboard.html."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import starmap
from typing import TYPE_CHECKING, Any

from train.errors import UserError, explain_os_error
from train.recorders.base import EpochRecord, Recorder, Start, StepRecord
from train.recorders.rank_log import warn_lost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HINT = "--tensorboard: the package tensorboard is not installed; run pip install tensorboard, or omit the option"


class TensorBoard(Recorder):
    """Writes scalars per optimizer step to `folder`. Used on rank 0."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def start(self, start: Start) -> None:
        """Open the writer, after removing the files of an earlier run.

        A resumed run keeps the files, and TensorBoard hides their records after the resumed step. Raises UserError if
        the package is missing or the folder cannot be written.
        """
        if find_spec("tensorboard") is None:
            raise UserError(HINT)
        # Imported only if it is used, because the import takes a second.
        from torch.utils.tensorboard import SummaryWriter

        with explain_os_error(f"cannot write the log {self.folder}"):
            if start.resumed_at is None and self.folder.exists():
                for path in self.folder.glob("events.out.tfevents.*"):
                    path.unlink()
            purge = None if start.resumed_at is None else start.resumed_at + 1
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
            self.writer.flush()

    def log(self, record: StepRecord) -> None:
        """Write the metrics since the previous record."""
        numbers = {
            "train/loss": record.trained.loss,
            **{f"train/{name}": value for name, value in record.trained.metrics.items()},
            "train/learning_rate": record.lr,
            "train/gradient_norm": record.grad_norm,
            "train/loss_scale": record.loss_scale,
            "speed/samples_per_second": record.samples_per_second,
            "speed/batch_time_s": record.batch_time_s,
            "speed/data_time_s": record.data_time_s,
            "memory/peak_bytes": record.peak_memory_bytes,
        }
        self._add(numbers, record.step)

    def epoch(self, record: EpochRecord) -> None:
        """Write the test metrics of an epoch."""
        if record.test is not None:
            metrics = {f"test/{name}": value for name, value in record.test.metrics.items()}
            self._add({"test/loss": record.test.loss, **metrics}, record.step)

    def _add(self, numbers: dict[str, float | None], step: int) -> None:
        scalars = [(name, number, step) for name, number in numbers.items() if number is not None]
        self._write(lambda writer: [*starmap(writer.add_scalar, scalars), writer.flush()])

    def _write(self, write: Callable[[Any], object]) -> None:
        if self.writer is not None:
            try:
                write(self.writer)
            except OSError as error:
                # It cannot continue after a failure.
                self.writer = None
                warn_lost(self.folder, error)

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Close the file."""
        self._write(lambda writer: writer.close())
