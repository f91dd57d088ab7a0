"""Several recorders at once."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from train.recorders.base import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from train.metrics import Meter
    from train.recorders.base import EpochRecord, Start, StepRecord


class Several(Recorder):
    """Hands everything on to each recorder, in order. The console is that of the first which has one."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.console = next((r.console for r in self.recorders if r.console is not None), None)
        self.stack = ExitStack()

    def start(self, start: Start) -> None:
        """Start all. Raises what the first that fails raises."""
        for recorder in self.recorders:
            recorder.start(start)

    def step(self, step: int, epoch: int, meter: Meter, samples_per_second: float) -> None:
        """Hand it on."""
        for recorder in self.recorders:
            recorder.step(step, epoch, meter, samples_per_second)

    def log(self, record: StepRecord) -> None:
        """Hand it on."""
        for recorder in self.recorders:
            recorder.log(record)

    def epoch(self, record: EpochRecord) -> None:
        """Hand it on."""
        for recorder in self.recorders:
            recorder.epoch(record)

    def note(self, text: str) -> None:
        """Hand it on."""
        for recorder in self.recorders:
            recorder.note(text)

    def warn(self, text: str) -> None:
        """Hand it on."""
        for recorder in self.recorders:
            recorder.warn(text)

    def end(self, seconds: float) -> None:
        """Hand it on."""
        for recorder in self.recorders:
            recorder.end(seconds)

    def __enter__(self) -> Self:
        for recorder in self.recorders:
            self.stack.enter_context(recorder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all, the last first, also where one fails at it."""
        self.stack.__exit__(kind, value, trace)
