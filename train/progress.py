"""What rank 0 shows while a run goes on: a bar on a terminal, a line per epoch elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from train.metrics import Meter, Score

LONGEST_NAME = 16  # characters beside the bar
REFRESH = 10  # steps between two readings of the meter: each waits for the device


@dataclass(frozen=True)
class Plan:
    """What lies ahead: name of the run, epochs, optimizer steps in all and per epoch."""

    run: str
    epochs: int
    steps: int
    steps_per_epoch: int


class Silent:
    """Shows nothing; base of the others.

    console: where others may print lines without breaking what is shown; None where nothing could break.
    """

    console: Console | None = None

    def start(self, plan: Plan) -> None:
        """Take note of the plan, before the first step."""

    def step(self, step: int, epoch: int, meter: Meter, samples_per_second: float) -> None:
        """Show one optimizer step of rank 0, counted from 1."""

    def epoch(self, step: int, epoch: int, trained: Score, test: Score, samples_per_second: float) -> None:
        """Show one epoch of all ranks, counted from 1."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back."""


class Lines(Silent):
    """One plain line per epoch, for logs and pipes."""

    def start(self, plan: Plan) -> None:
        """Take note of the plan."""
        self.plan = plan

    def epoch(self, step: int, epoch: int, trained: Score, test: Score, samples_per_second: float) -> None:
        """Write the line; flushed, for a log is read while it grows."""
        width = len(str(self.plan.epochs))
        sys.stdout.write(
            f"{self.plan.run}: epoch {epoch:{width}}/{self.plan.epochs}  step {step}/{self.plan.steps}  "
            f"loss {trained.loss:.4f}  train {trained.accuracy:.1%}  test {test.accuracy:.1%}  "
            f"{samples_per_second:.0f} samples/s\n"
        )
        sys.stdout.flush()


class Bar(Silent):
    """A bar over the whole run; its numbers are rank 0's own within an epoch, and all ranks' at its end."""

    def __init__(self) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),  # two lines of numbers and the longest name then fit 80 columns
            TextColumn("{task.fields[numbers]}"),
            console=Console(),
        )
        self.console = self.bar.console
        self.test = ""

    def start(self, plan: Plan) -> None:
        """Draw the empty bar."""
        self.plan = plan
        # A long name would leave no room for the numbers.
        short = plan.run if len(plan.run) <= LONGEST_NAME else ""
        self.task = self.bar.add_task(short, total=plan.steps, numbers="")
        self.bar.start()
        if not short:
            self.bar.console.print(plan.run)

    def step(self, step: int, epoch: int, meter: Meter, samples_per_second: float) -> None:
        """Move the bar; read the meter now and then."""
        if step % REFRESH:
            self.bar.update(self.task, completed=step)
        else:
            self._show(step, epoch, meter.local(), samples_per_second)

    def epoch(self, step: int, epoch: int, trained: Score, test: Score, samples_per_second: float) -> None:
        """Show the numbers of all ranks."""
        self.test = f"  test {test.accuracy:.1%}"
        self._show(step, epoch, trained, samples_per_second)

    def _show(self, step: int, epoch: int, score: Score, samples_per_second: float) -> None:
        numbers = (
            f"epoch {epoch}/{self.plan.epochs}  step {step}/{self.plan.steps}\n"
            f"loss {score.loss:.4f}  train {score.accuracy:.1%}{self.test}  {samples_per_second:.0f} samples/s"
        )
        self.bar.update(self.task, completed=step, numbers=numbers)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last state on the terminal."""
        self.bar.stop()


def make_progress(kind: str, *, is_main: bool) -> Silent:
    """Choose what to show. kind: bar, plain, none, or auto: a bar where the output is a terminal."""
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "plain"
    if not is_main or kind == "none":
        return Silent()
    return Bar() if kind == "bar" else Lines()
