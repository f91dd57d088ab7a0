"""Comparisons of all replicas in a watched run, at reductions that all ranks agree on without waiting.

A reduction has the same number on all ranks, so every rank knows when a periodic check is due. After a finding of a
witness, the judging rank plans one more: it announces the check two reductions ahead, before it enters the next one. No
rank completes that next reduction without it, so every rank reads the announcement in time.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.monitor import SyncMonitor
from syncheck.live.watching.settings import SAVE_FOLDER
from syncheck.readers.metadata_block import metadata

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.live.watching.clock import Clock
    from syncheck.live.watching.settings import WatchSettings
    from syncheck.live.watching.watcher import Watcher
    from syncheck.records import Report

# The second reduction, after the first step of most scripts, is checked too.
_FIRST = 2
# Ranks look for announcements at every fourth reduction.
_PERIOD = 4
# A rank that does not come to a check has ended, or hangs, as it would without the check.
_TIMEOUT = timedelta(seconds=120)


class FullChecks:
    """The comparisons of the wrappers of this process."""

    def __init__(self, watcher: Watcher, settings: WatchSettings) -> None:
        self._watcher, self._settings = watcher, settings
        self.wanted = False
        """Whether the judge of this rank wants a check soon."""
        self.reports: list[Report] = []
        # The process group and the monitor of each set of ranks.
        self._groups: dict[tuple[int, ...], Any] = {}
        self._monitors: dict[tuple[int, ...], tuple[tuple[int, ...], SyncMonitor]] = {}
        self._is_saved = False
        # The number of the reduction of the last check.
        self._number = 0

    def add(self, clock: Clock) -> None:
        """Create a process group for the checks. The ranks of a wrapper create it together, and may wait here too."""
        if clock.ranks not in self._groups:
            distributed: Any = sys.modules["torch.distributed"]
            # Messages of a check must not come between messages of the script.
            self._groups[clock.ranks] = distributed.new_group(
                list(clock.ranks), timeout=_TIMEOUT, backend="gloo", use_local_synchronization=True
            )

    def tick(self, clock: Clock) -> None:
        """Check after a reduction, if a check is due. Raises OutOfSync with `raise`."""
        # One clock of each set of ranks states when all of their wrappers are checked.
        if clock.is_first and self._is_due(clock) and not clock.keeps_gradients_local():
            self._check(clock)

    def _check(self, clock: Clock) -> None:
        self._number = clock.ticks
        monitor = self._get_monitor(clock)
        last_report = monitor.last
        try:
            monitor.step(clock.ticks)
        except UsageError as error:
            # `resync` refuses on all ranks, for example without a majority; the run goes on, and so does watching.
            self._watcher.print_line(str(error))
        finally:
            # The summary has the report that raises, too.
            if monitor.last is not None and monitor.last is not last_report:
                self.reports.append(monitor.last)

    def _is_due(self, clock: Clock) -> bool:
        number = clock.ticks
        is_planned = self._is_planned(clock)
        return is_planned or number == _FIRST or number % self._settings.every == 0

    def _is_planned(self, clock: Clock) -> bool:
        """Announce or read a plan; return whether a check is planned for this reduction."""
        board = self._watcher.board
        if board is None:
            return False
        number = clock.ticks
        if self.wanted and number % _PERIOD == _PERIOD - 2:
            self.wanted = False
            board.post(f"check/{clock.name}/{number + 2}", {})
        if number % _PERIOD:
            return False
        return bool(board.read(f"check/{clock.name}/{number}"))

    def _get_monitor(self, clock: Clock) -> SyncMonitor:
        """Return the monitor of the wrappers and optimizers of some ranks, at the number of a reduction."""
        wrappers = self._watcher.list_wrappers(clock.ranks)
        optimizers = self._watcher.list_optimizers(clock.ranks)
        objects = (*wrappers, *optimizers)
        identities = tuple(map(id, objects))
        last_monitor = self._monitors.get(clock.ranks)
        # A GAN creates its wrappers one after the other; optimizers appear at their first step.
        if last_monitor is None or last_monitor[0] != identities:
            monitor = SyncMonitor(
                wrappers[0] if len(wrappers) == 1 else tuple(wrappers),
                _simplify(optimizers),
                # When a check is due is decided here.
                every=1,
                on_desync=self._choose_action(wrappers, optimizers),
                group=self._groups[clock.ranks],
                start=clock.ticks - 1,
                events=self._settings.events if 0 in clock.ranks else None,
                only=self._settings.only,
                include=self._settings.include,
                exclude=self._settings.exclude,
                allow=self._settings.allow,
            )
            last_monitor = self._monitors[clock.ranks] = (identities, monitor)
        return last_monitor[1]

    def _choose_action(self, wrappers: list[Any], optimizers: list[Any]) -> Any:
        if self._settings.on_desync != "save":
            return self._settings.on_desync
        return self._make_saver(wrappers, optimizers)

    def _make_saver(self, wrappers: list[Any], optimizers: list[Any]) -> Callable[[Report], None]:
        """Return an action that saves one checkpoint per rank at the first desync."""

        def save(_report: Report) -> None:
            if self._is_saved:
                return
            self._is_saved = True
            torch: Any = sys.modules["torch"]
            distributed: Any = sys.modules["torch.distributed"]
            rank, ranks = distributed.get_rank(), distributed.get_world_size()
            folder = os.path.join(SAVE_FOLDER, f"step_{self._number}")
            os.makedirs(folder, exist_ok=True)
            content: dict[str, Any] = {}
            for number, wrapper in enumerate(wrappers):
                content["model" if number == 0 else f"model{number}"] = wrapper.module.state_dict()
            for number, optimizer in enumerate(optimizers):
                content["optimizer" if number == 0 else f"optimizer{number}"] = optimizer.state_dict()
            content["syncheck"] = metadata(model=wrappers[0].module, run="watch", rank=rank, world_size=ranks)
            # A file of an earlier run is not overwritten; the error ends watching with one line, and the run goes on.
            with open(os.path.join(folder, f"rank_{rank}.pth"), "xb") as file:
                torch.save(content, file)

        return save


def _simplify(objects: list[Any]) -> Any:
    """Return None, the only object, or all of them."""
    if len(objects) < 2:
        return objects[0] if objects else None
    return tuple(objects)
