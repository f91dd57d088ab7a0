"""The checks of --monitor: whether all ranks still hold the same model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from train.optional import SyncMonitor, metadata

if TYPE_CHECKING:
    from rich.console import Console

    from train.trainer import Trainer


class SyncChecks:
    """Calls a SyncMonitor after every optimizer step. Build it with --monitor.

    console: output of the checks on rank 0, by default stderr.
    """

    def __init__(self, trainer: Trainer, console: Console | None = None) -> None:
        self.settings, self.trainer = trainer.settings, trainer
        # Further contents of a checkpoint, under the same keys.
        self.extras: dict[str, Any] = {}
        method = trainer.method
        # Without --amp fp16 the scaler has no state to compare.
        scaler = trainer.scaler if trainer.scaler.is_enabled() else None
        (replica,) = method.list_replicas(trainer.optimizer)
        self.monitor = SyncMonitor(
            (method.monitored, self.extras),
            replica.optimizer,
            scaler,
            every=self.settings.monitor,
            on_desync=self.settings.on_desync or "warn",
            console=console,
        )

    def after_step(self, step: int, *, last: bool) -> str:
        """Check if it is due after this step, counted from 1, or if it is the last step; a collective in that case.

        Returns the findings in a few words for a log, or an empty string.
        """
        # Metadata that may change between steps, for example the last average of localsgd. The block is equal on all
        # ranks, because the monitor knows the ranks.
        facts = self.trainer.method.metadata_fields
        if (averages := self.trainer.averages) is not None:
            self.extras["ema"] = averages
        self.extras["syncheck"] = metadata(run=self.settings.run, rank=0, world_size=1, step=step, **facts)
        before = self.monitor.checks
        self.monitor.step(step)
        if last:
            self.monitor.close()
        if self.monitor.checks == before:
            return ""
        report = self.monitor.last
        assert report is not None
        if report.verdict != "out_of_sync":
            return ""
        codes: set[str] = set()
        for group in report.groups:
            codes.update(finding.code for finding in group.findings)
        return f"step {step}: the ranks are out of sync: {', '.join(sorted(codes))}"
