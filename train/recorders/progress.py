"""What rank 0 shows while a run goes on: a bar on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import sys
import time
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.recorders.base import EpochRecord, Recorder, Start, StepRecord
from train.recorders.output import Output

if TYPE_CHECKING:
    from types import TracebackType

    from train.metrics import Meter, Score

LONGEST_NAME = 10  # characters beside the bar
REFRESH = 10  # steps between two readings of the meter: each waits for the device
LISTED = 8  # ranks whose shares are listed one by one


def remarks(start: Start) -> list[str]:
    """Say what a user may not expect: unequal shares, a learning rate that was not typed, a slow first step."""
    found, shares = [], start.shares
    if len(set(shares)) > 1:
        more = shares.count(shares[0])
        text = ", ".join(map(str, shares))
        if len(shares) > LISTED:
            text = f"{shares[0]} on each of the first {more}, {shares[-1]} on each of the others"
        found.append(f"{sum(shares)} samples a step over {len(shares)} ranks: {text}")
    if start.peak_lr != start.settings.lr:
        lr, scale = start.settings.lr, start.settings.lr_scale
        found.append(f"learning rate {start.peak_lr:g}: {lr:g} x {start.peak_lr / lr:.3g}, {scale} in the processes")
    if start.settings.compile:
        found.append("--compile: the first step generates code, which may take a minute")
    return found


class Lines(Recorder):
    """One plain line per epoch, for logs and pipes, and one per --log-interval where that was asked for."""

    def __init__(self, output: Output) -> None:
        self.output = output

    def start(self, start: Start) -> None:
        """Take note of the plan; write what is out of the ordinary."""
        self.plan, self.each = start.plan, start.settings.log_interval is not None
        for text in remarks(start):
            self.output.write(f"{self.plan.run}: {text}\n")

    def log(self, record: StepRecord) -> None:
        """Write the line of some steps."""
        if self.each:
            self._write(record.epoch, record.step, record.trained, f"lr {record.lr:.3g}  ", record.samples_per_second)

    def epoch(self, record: EpochRecord) -> None:
        """Write the line of an epoch."""
        test = "" if record.test is None else f"test {record.test.accuracy:.1%}  "
        self._write(record.epoch, record.step, record.trained, test, record.samples_per_second)

    def _write(self, epoch: int, step: int, trained: Score, more: str, speed: float) -> None:
        width = len(str(self.plan.epochs))
        self.output.write(
            f"{self.plan.run}: epoch {epoch:{width}}/{self.plan.epochs}  step {step}/{self.plan.steps}  "
            f"loss {trained.loss:.4f}  train {trained.accuracy:.1%}  {more}{speed:.0f} samples/s\n"
        )


class Bar(Recorder):
    """A bar over the whole run; its numbers are rank 0's own within an epoch, and all ranks' at its end."""

    def __init__(self, output: Output) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),  # two lines of numbers and the longest name then fit 80 columns
            TextColumn("{task.fields[numbers]}"),
            console=Console(file=cast("IO[str]", output)),
        )
        self.console = self.bar.console
        self.test = ""
        self.first: tuple[int, float] | None = None  # the first step seen, and when

    def start(self, start: Start) -> None:
        """Draw the empty bar."""
        self.plan = start.plan
        # A long name would leave no room for the numbers.
        short = self.plan.run if len(self.plan.run) <= LONGEST_NAME else ""
        self.task = self.bar.add_task(short, total=self.plan.steps, completed=start.resumed_at or 0, numbers="")
        self.bar.start()
        for text in ([] if short else [self.plan.run]) + remarks(start):
            self.bar.console.print(text, highlight=False, soft_wrap=True)

    def step(self, step: int, epoch: int, meter: Meter, samples_per_second: float) -> None:
        """Move the bar; read the meter now and then."""
        if self.first is None:
            self.first = step, time.monotonic()
        if step % REFRESH:
            self.bar.update(self.task, completed=step)
        else:
            self._show(step, epoch, meter.local(), samples_per_second)

    def epoch(self, record: EpochRecord) -> None:
        """Show the numbers of all ranks."""
        if record.test is not None:
            self.test = f"  test {record.test.accuracy:.1%}"
        self._show(record.step, record.epoch, record.trained, record.samples_per_second)

    def _show(self, step: int, epoch: int, score: Score, samples_per_second: float) -> None:
        numbers = (
            f"epoch {epoch}/{self.plan.epochs}  step {step}/{self.plan.steps}{self._left(step)}\n"
            f"loss {score.loss:.4f}  train {score.accuracy:.1%}{self.test}  {samples_per_second:.0f} samples/s"
        )
        self.bar.update(self.task, completed=step, numbers=numbers)

    def _left(self, step: int) -> str:
        """Say how long it will take at the pace so far, evaluations included."""
        if self.first is None or not self.first[0] < step < self.plan.steps:
            return ""
        first, since = self.first
        return f"  {clock((time.monotonic() - since) * (self.plan.steps - step) / (step - first))} left"

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the terminal."""
        self.bar.stop()


def clock(seconds: float) -> str:
    """Write a time as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def make_progress(kind: str, *, is_main: bool, output: Output | None = None) -> Recorder:
    """Choose what to show. kind: bar, plain, none, or auto: a bar where the output is a terminal."""
    output = output or Output()
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "plain"
    if not is_main or kind == "none":
        return Recorder()
    return Bar(output) if kind == "bar" else Lines(output)
