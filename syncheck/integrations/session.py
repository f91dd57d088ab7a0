"""The monitor of one training run, shared by the callbacks of all libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from syncheck.live import SyncMonitor


class MonitorSession:
    """A callback that creates a monitor at the start of each training run, and ends it with the run.

    every, on_desync and monitor_options: as in `syncheck.live.SyncMonitor`; invalid values raise UsageError here,
    before the training. With witnesses=, wrappers that are created from now on are watched at every step. monitor: of
    the current or last run.
    """

    def __init__(self, every: int, on_desync: Any, **monitor_options: Any) -> None:
        super().__init__()
        from syncheck.live import SyncMonitor

        self._options = {"every": every, "on_desync": on_desync, **monitor_options}
        self.monitor: SyncMonitor | None = None
        # Only to check the options: the model does not exist yet.
        SyncMonitor(None, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        # Launchers pickle the callback for spawned processes; a monitor belongs to one process.
        return {**self.__dict__, "monitor": None}

    def _begin(self, model: Any, optimizer: Any, scaler: Any, *, start: int, writer: Any = None) -> None:
        """Create the monitor. start: steps before this run. writer: unless the options contain a writer."""
        from syncheck.live import SyncMonitor

        arguments: dict[str, Any] = {"scaler": scaler, "start": start, "writer": writer, **self._options}
        self.monitor = SyncMonitor(model, optimizer, **arguments)

    def _step(self, *, last: bool) -> None:
        """Count an optimizer step. last: check in any case, because no step follows."""
        if self.monitor is None:
            return

        try:
            # Count steps that the gradient scaler skipped too: ranks with equal counts do not wait for each other.
            report = self.monitor.step()
            was_checked = report is not None
            if last and not was_checked:
                self.monitor.check()
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """End without a check, after an exception."""
        if self.monitor is not None:
            # As a `with` statement ends the monitor.
            self.monitor.__exit__(type(error), error, error.__traceback__)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Check if steps followed the last check."""
        if self.monitor is not None:
            self.monitor.close()
