"""Progress on rank 0: a bar on a terminal, otherwise a line per epoch."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.recorders.base import EpochRecord, Recorder, Start, StepRecord

if TYPE_CHECKING:
    from train.metrics import MetricSums, Score

# Characters of the run's name beside the bar.
MAX_NAME = 10
# Steps between reads of the sums, because each read synchronizes with the device.
REFRESH = 10
# Maximum number of ranks for listing every share.
MAX_LISTED = 8


class Output:
    """A file object that writes to the current sys.stdout, used on rank 0.

    If a write fails, for example because stdout is a file on a full disk, the run continues. Later output is dropped,
    and `lost` holds the error. BrokenPipeError is raised as usual, so that closing a pipe such as `| head` ends the
    run.
    """

    def __init__(self) -> None:
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text and flush it, because logs are read during the run. Raises BrokenPipeError."""
        if self.lost is None:
            try:
                _stdout().write(text)
                _stdout().flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                self.lost = error
        return len(text)

    def flush(self) -> None:
        """Do nothing, because `write` flushes."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of stdout: rich needs isatty, fileno and encoding."""
        return getattr(_stdout(), name)


def _stdout() -> TextIO:
    """Return the real stdout: while rich draws a bar, it replaces sys.stdout with a proxy that writes to Output."""
    stdout: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    return stdout


def describe_surprises(start: Start) -> list[str]:
    """Return a line for each property that users may not expect: unequal shares, a scaled rate, a slow first step."""
    lines, shares = [], start.shares
    if len(set(shares)) > 1:
        larger = shares.count(shares[0])
        text = ", ".join(map(str, shares))
        if len(shares) > MAX_LISTED:
            text = f"{shares[0]} on each of the first {larger} ranks, {shares[-1]} on each other rank"
        lines.append(f"{sum(shares)} samples a step over {len(shares)} ranks: {text}")
    if start.peak_lr != start.settings.lr:
        lr, scale = start.settings.lr, start.settings.lr_scale
        lines.append(f"learning rate {start.peak_lr:g}: {lr:g} x {start.peak_lr / lr:.3g} (--lr-scale {scale})")
    if start.settings.compile:
        lines.append("--compile: the first step compiles the model, which may take a minute")
    return lines


class Lines(Recorder):
    """Prints a plain line per epoch, for logs and pipes, and a line per explicit --log-interval."""

    def __init__(self, output: Output) -> None:
        self.output = output

    def start(self, start: Start) -> None:
        """Print the properties that users may not expect."""
        self.plan, self.prints_records = start.plan, start.settings.log_interval is not None
        for text in describe_surprises(start):
            self.output.write(f"{self.plan.run}: {text}\n")

    def log(self, record: StepRecord) -> None:
        """Print the line of a record if --log-interval is set."""
        if self.prints_records:
            self._write(record, f"lr {record.lr:.3g}  ", record.batch_time_max_s)

    def epoch(self, record: EpochRecord) -> None:
        """Print the line of an epoch."""
        test = ""
        if record.test is not None:
            test = f"test {record.test.format()}{format_top5(record.test)}  "
        self._write(record, test, record.step_time_s)

    def _write(self, record: StepRecord | EpochRecord, details: str, step_time: float) -> None:
        width, trained = len(str(self.plan.epochs)), record.trained
        self.output.write(
            f"{self.plan.run}: epoch {record.epoch:{width}}/{self.plan.epochs}  step {record.step}/{self.plan.steps}  "
            f"loss {trained.loss:.4f}  train {trained.format()}  {details}"
            f"{record.samples_per_second:.0f} samples/s, {1000 * step_time:.1f} ms/step\n"
        )


def format_top5(test: Score) -> str:
    """Format the top-5 accuracy; empty with at most five classes, or for a task without this metric."""
    top5 = test.metrics.get("top5_accuracy", math.nan)
    if math.isnan(top5):
        return ""
    return f"  top-5 {top5:.1%}"


class Bar(Recorder):
    """Draws a bar over the whole run. Its metrics are rank 0's within an epoch, and those of all ranks at its end."""

    def __init__(self, output: Output) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=14),  # fits 80 columns with the metrics and a name of 10 characters
            TextColumn("{task.fields[numbers]}"),
            console=Console(file=cast("IO[str]", output)),
            speed_estimate_period=math.inf,  # the time left includes evaluations
        )
        self.console = self.bar.console
        self.test = self.top5 = ""

    def start(self, start: Start) -> None:
        """Draw the empty bar."""
        self.plan, self.batch_size = start.plan, start.settings.batch_size
        # A longer name would leave no room for the metrics, and is printed above the bar.
        name, lines = self.plan.run, describe_surprises(start)
        if len(name) > MAX_NAME:
            name, lines = "", [name, *lines]
        self.task = self.bar.add_task(name, total=self.plan.steps, completed=start.resumed_at or 0, numbers="")
        self.bar.start()
        for text in lines:
            self.bar.console.print(text, highlight=False, soft_wrap=True)

    def step(self, step: int, epoch: int, metric_sums: MetricSums, samples_per_second: float) -> None:
        """Move the bar, and read the sums every few steps."""
        self.bar.update(self.task, completed=step)
        if step % REFRESH == 0:
            step_time = self.batch_size / samples_per_second
            self._show(step, epoch, metric_sums.local(), samples_per_second, step_time)

    def epoch(self, record: EpochRecord) -> None:
        """Show the metrics of all ranks."""
        if record.test is not None:
            self.test, self.top5 = f"  test {record.test.format()}", format_top5(record.test)
        self._show(record.step, record.epoch, record.trained, record.samples_per_second, record.step_time_s)

    def _show(self, step: int, epoch: int, score: Score, samples_per_second: float, step_time: float) -> None:
        seconds = self.bar.tasks[0].time_remaining
        remaining = f"  {timedelta(seconds=round(seconds))} left".replace("  0:", "  ") if seconds else ""
        numbers = (
            f"epoch {epoch}/{self.plan.epochs}  step {step}/{self.plan.steps}{remaining}\n"
            f"loss {score.loss:.4f}  train {score.format()}{self.test}  {samples_per_second:.0f} samples/s\n"
            f"{1000 * step_time:.1f} ms/step{self.top5}"
        )
        self.bar.update(self.task, completed=step, numbers=numbers)

    def close(self, error: BaseException | None) -> None:  # noqa: ARG002
        """Stop the bar, and leave its last state on the terminal."""
        self.bar.stop()


def make_progress(kind: str, *, is_main: bool, output: Output | None = None) -> Recorder:
    """Build the recorder of --progress. kind: bar, plain, none, or auto (a bar if stdout is a terminal)."""
    if not is_main or kind == "none":
        return Recorder()
    if kind == "auto":
        kind = "bar" if sys.stdout.isatty() else "plain"
    kinds = {"bar": Bar, "plain": Lines}
    return kinds[kind](output or Output())
