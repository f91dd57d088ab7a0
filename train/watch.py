"""--monitor: check during the training that all ranks hold the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncheck import metadata
from syncheck.live import SyncMonitor

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import Console

    from train.step import Step


class Watch:
    """Asks a monitor after every optimizer step; without --monitor it does nothing.

    console: where rank 0 prints the checks; None for stderr.
    """

    def __init__(self, trainer: Step, console: Console | None = None) -> None:
        self.settings, self.trainer = trainer.settings, trainer
        # What a checkpoint of this trainer holds beside the model, under the same keys.
        self.beside: dict[str, Any] = {}
        if trainer.average is not None:
            self.beside["ema"] = trainer.average.parameters
        self.monitor: SyncMonitor | None = None
        if self.settings.monitor:
            method, scaler = trainer.method, trainer.scaler
            (replica,) = method.state(trainer.optimizer)
            self.monitor = SyncMonitor(
                (method.module, self.beside),
                replica.optimizer,
                scaler if scaler.is_enabled() else None,
                every=self.settings.monitor,
                on_desync=self.settings.on_desync or "warn",
                console=console,
            )

    def after_step(self, step: int, *, last: bool) -> str:
        """Check if it is due after this step, counted from 1, and in any case after the last one; a collective then.

        Returns what the check has found, in a few words for a log; empty where all is well or nothing was due.
        """
        if self.monitor is None:
            return ""
        # What no tensor tells, and what may change from step to step: when localsgd averaged last. The same block on
        # all ranks: who they are the monitor knows.
        facts = self.trainer.method.metadata_fields
        self.beside["syncheck"] = metadata(run=self.settings.run, rank=0, world_size=1, step=step, **facts)
        before = self.monitor.checks
        self.monitor.step(step)
        if last:
            self.monitor.close()
        report = self.monitor.last if self.monitor.checks > before else None
        if report is None or report.verdict != "out_of_sync":
            return ""
        codes = sorted({finding.code for group in report.groups for finding in group.findings})
        return f"step {step}: the ranks are out of sync: {', '.join(codes)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the monitor; after an exception without a check, for the other ranks may be gone."""
        if self.monitor is not None:
            self.monitor.__exit__(kind, value, trace)
