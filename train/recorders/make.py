"""Which recorders a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.recorders.metrics_file import MetricsFile
from train.recorders.progress import make_progress
from train.recorders.rank_log import RankLog
from train.recorders.several import Several
from train.recorders.tensorboard import TensorBoard

if TYPE_CHECKING:
    from train.launch import RankContext
    from train.recorders.base import Recorder
    from train.recorders.output import Output
    from train.settings import Settings


def make_recorder(
    settings: Settings, ctx: RankContext, progress: str, output: Output | None = None, launcher: str | None = None
) -> Recorder:
    """Build what this rank shows and writes. Nothing is opened before the run starts.

    progress: bar, plain, none or auto. launcher: what started the run, or None where nobody knows.
    """
    recorders = [make_progress(progress, is_main=ctx.is_main, output=output)]
    if settings.log_dir is not None:
        folder = settings.log_dir / settings.run
        recorders.append(RankLog(folder / f"rank_{ctx.rank}.log", launcher))
        if ctx.is_main:
            recorders.append(MetricsFile(folder / "metrics.jsonl", launcher))
            if settings.tensorboard:
                recorders.append(TensorBoard(folder / "tensorboard"))
    return Several(recorders) if len(recorders) > 1 else recorders[0]
