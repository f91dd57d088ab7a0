"""What the callbacks of all libraries do with a monitor; what differs is which of their hooks calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.live import SyncMonitor


class MonitorSession:
    """Makes a monitor at the start of each training, and ends it with the training.

    every, on_desync, options: of SyncMonitor; UsageError for wrong ones comes here, before anything is trained.
    monitor: of the training that runs, or that ran last.
    """

    def __init__(self, every: int, on_desync: Any, options: Mapping[str, Any]) -> None:
        from syncheck.live import SyncMonitor

        self._options = {"every": every, "on_desync": on_desync, **options}
        self.monitor: SyncMonitor | None = None
        SyncMonitor(None, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        # Launchers that spawn processes send the callback to them; a monitor belongs to the process that it is in.
        return {**self.__dict__, "monitor": None}

    def begin(self, model: Any, optimizer: Any, scaler: Any, *, start: int, writer: Any = None) -> None:
        """Watch these from now on. start: steps done before. writer: unless the options have one."""
        from syncheck.live import SyncMonitor

        given: dict[str, Any] = {"scaler": scaler, "start": start, "writer": writer, **self._options}
        self.monitor = SyncMonitor(model, optimizer, **given)

    def step(self, *, last: bool) -> None:
        """Count an optimizer step. last: check in any case, for no further step will follow."""
        if self.monitor is None:
            return
        try:
            # Also a step that the gradient scaler skipped is one: ranks that count alike do not wait for each other.
            if self.monitor.step() is None and last:
                self.monitor.check()
        except BaseException as error:
            self.fail(error)
            raise

    def end(self) -> None:
        """Check what was done since the last check, if anything was."""
        if self.monitor is not None:
            self.monitor.close()

    def fail(self, error: BaseException) -> None:
        """End without a check, after an exception."""
        if self.monitor is not None:
            self.monitor.__exit__(type(error), error, error.__traceback__)
