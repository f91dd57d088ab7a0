"""The monitor of a callback, shared by all libraries; the hooks of each library call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.live import SyncMonitor


class Watching:
    """Create a monitor at the start of each training, and close it at the end.

    every, on_desync, options: as for SyncMonitor. monitor: of the current or most recent training. Raises UsageError
    for wrong options, before training starts.
    """

    def __init__(self, every: int, on_desync: Any, options: Mapping[str, Any]) -> None:
        from syncheck.live import SyncMonitor

        self._options = {"every": every, "on_desync": on_desync, **options}
        self.monitor: SyncMonitor | None = None
        SyncMonitor(None, **self._options)

    def __getstate__(self) -> dict[str, Any]:
        # Launchers send the callback to spawned processes, and a monitor belongs to one process.
        return {**self.__dict__, "monitor": None}

    def begin(self, model: Any, optimizer: Any, scaler: Any, *, start: int, writer: Any = None) -> None:
        """Create the monitor. start: number of completed steps. writer: the default of the option `writer`."""
        from syncheck.live import SyncMonitor

        given: dict[str, Any] = {"scaler": scaler, "start": start, "writer": writer, **self._options}
        self.monitor = SyncMonitor(model, optimizer, **given)

    def step(self, *, last: bool) -> None:
        """Count an optimizer step, and check if a check is due. last: always check, because this is the last step."""
        if self.monitor is None:
            return
        try:
            # Steps skipped by the gradient scaler count too, so that all ranks have equal counts and check together.
            if self.monitor.step() is None and last:
                self.monitor.check()
        except BaseException as error:
            self.fail(error)
            raise

    def end(self) -> None:
        """Check the steps since the last check, if any, and close the monitor."""
        if self.monitor is not None:
            self.monitor.close()

    def fail(self, error: BaseException) -> None:
        """Close the monitor without a check, after an exception."""
        if self.monitor is not None:
            self.monitor.__exit__(type(error), error, error.__traceback__)
