"""The recorders that the options of a run select, combined into one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from train.recorders.base import Recorder
from train.recorders.metrics_file import MetricsFile
from train.recorders.progress import make_progress
from train.recorders.rank_log import RankLog
from train.recorders.tensorboard import TensorBoard

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from train.launch import RankContext
    from train.metrics import Meter
    from train.recorders.base import EpochRecord, Start, StepRecord
    from train.recorders.output import Output
    from train.settings import Settings


class CompositeRecorder(Recorder):
    """Calls several recorders in order. Its console is the first console of a recorder."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.console = next((r.console for r in self.recorders if r.console is not None), None)
        self.stack = ExitStack()

    def start(self, start: Start) -> None:
        """Start all recorders; the first exception is raised."""
        for recorder in self.recorders:
            recorder.start(start)

    def step(self, step: int, epoch: int, meter: Meter, samples_per_second: float) -> None:
        """Pass a step to all recorders."""
        for recorder in self.recorders:
            recorder.step(step, epoch, meter, samples_per_second)

    def log(self, record: StepRecord) -> None:
        """Pass a record of steps to all recorders."""
        for recorder in self.recorders:
            recorder.log(record)

    def epoch(self, record: EpochRecord) -> None:
        """Pass a record of an epoch to all recorders."""
        for recorder in self.recorders:
            recorder.epoch(record)

    def note(self, text: str) -> None:
        """Pass a line of text to all recorders."""
        for recorder in self.recorders:
            recorder.note(text)

    def warn(self, text: str) -> None:
        """Pass a warning to all recorders."""
        for recorder in self.recorders:
            recorder.warn(text)

    def end(self, seconds: float) -> None:
        """Pass the duration of the run to all recorders."""
        for recorder in self.recorders:
            recorder.end(seconds)

    def __enter__(self) -> Self:
        for recorder in self.recorders:
            self.stack.enter_context(recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all recorders in reverse order, even if closing one of them fails."""
        self.stack.__exit__(kind, value, trace)


def make_recorder(
    settings: Settings, ctx: RankContext, progress: str, output: Output | None = None, launcher: str | None = None
) -> Recorder:
    """Build the recorders of this rank, without opening files.

    progress: bar, plain, none or auto. launcher: the name of the launcher, None if unknown.
    """
    recorders = [make_progress(progress, is_main=ctx.is_main, output=output)]
    if settings.log_dir is not None:
        folder = settings.log_dir / settings.run
        recorders.append(RankLog(folder / f"rank_{ctx.rank}.log", launcher))
        if ctx.is_main:
            recorders.append(MetricsFile(folder / "metrics.jsonl", launcher))
            if settings.tensorboard:
                recorders.append(TensorBoard(folder / "tensorboard"))
    return CompositeRecorder(recorders) if len(recorders) > 1 else recorders[0]
