"""The recorders that the options of a run select, combined into one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from train.recorders.base import Recorder
from train.recorders.metrics_file import MetricsFile
from train.recorders.progress import make_progress
from train.recorders.rank_log import RankLog
from train.recorders.tensorboard import TensorBoard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from train.launch import RankContext
    from train.recorders.progress import Output
    from train.settings import Settings


def _forward(hook: str) -> Callable[..., None]:
    """Return a method that calls the hook of all recorders; the first exception is raised."""

    def call(self: CompositeRecorder, *values: Any) -> None:
        for recorder in self.recorders:
            getattr(recorder, hook)(*values)

    return call


class CompositeRecorder(Recorder):
    """Calls several recorders in order. Its console is the first console of a recorder."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self.recorders = tuple(recorders)
        self.console = next((r.console for r in self.recorders if r.console is not None), None)

    start, step, log, epoch, note = map(_forward, ("start", "step", "log", "epoch", "note"))

    def close(self, error: BaseException | None) -> None:
        """Close all recorders in reverse order, even if closing one of them fails."""
        with ExitStack() as stack:
            for recorder in self.recorders:
                stack.callback(recorder.close, error)


def make_recorder(settings: Settings, ctx: RankContext, progress: str, output: Output | None = None) -> Recorder:
    """Build the recorders of this rank, without opening files. progress: bar, plain, none or auto."""
    recorders = [make_progress(progress, is_main=ctx.is_main, output=output)]
    if settings.log_dir is not None:
        folder = settings.log_dir / settings.run
        recorders.append(RankLog(folder / f"rank_{ctx.rank}.log", ctx.launcher))
        if ctx.is_main:
            recorders.append(MetricsFile(folder / "metrics.jsonl", ctx.launcher))
            if settings.tensorboard:
                recorders.append(TensorBoard(folder / "tensorboard"))
    return CompositeRecorder(recorders) if len(recorders) > 1 else recorders[0]
