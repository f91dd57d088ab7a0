"""Comparisons of all replicas in a watched run, at reductions that all ranks agree on without waiting.

A reduction has the same number on all ranks, so every rank knows when a periodic check is due. After a finding of a
witness, the judging rank plans one more: it announces the check two reductions ahead, before it enters the next one. No
rank completes that next reduction without it, so every rank reads the announcement in time.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from syncheck.errors import UsageError
from syncheck.live.channel import Channel, create_group
from syncheck.live.memory.optimizers import read_optimizer
from syncheck.live.monitor import SyncMonitor
from syncheck.live.reporter import Reporter
from syncheck.live.watching.board import Unusable
from syncheck.live.watching.clock import list_wrappers, unwrap
from syncheck.live.watching.divided import list_undivided
from syncheck.live.watching.ignored import list_ignored
from syncheck.live.watching.last_steps import watch_sent_states
from syncheck.live.watching.passing_changes import PassingChanges
from syncheck.live.watching.settings import SAVE_FOLDER, name_file_of_judge
from syncheck.readers.metadata_block import metadata
from syncheck.text import options_as_typed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from syncheck.live.watching.clock import Clock
    from syncheck.live.watching.layouts import Layout
    from syncheck.live.watching.settings import WatchSettings
    from syncheck.live.watching.watcher import Watcher
    from syncheck.records import Report

# The second reduction, after the first step of most scripts, is checked too.
_FIRST = 2
# Ranks look for announcements at every fourth reduction.
_PERIOD = 4
# Reductions of each wrapper before a periodic check at which parameters are observed.
_OBSERVED = 2
# Seconds that the first rank waits for the other ranks at the end.
_END_SECONDS = 2.0
# Seconds that it waits for them once more, when all have come.
_MEETING_SECONDS = 1.0
# Seconds that the first rank waits for the ranks that create a wrapper together. Only an unwatched rank stays away.
_START_SECONDS = 10.0
# Lines about the same findings, and about repairs that are refused.
_MOST_REPEATED = 3
# A rank that does not come to a check has ended, or hangs, as it would without the check.
_TIMEOUT = timedelta(seconds=120)
_PASSING_CHANGES = (
    "parameters are changed before a reduction and restored before the step, as SAM does, so all replicas are compared "
    "at the end only"
)
_NO_REDUCTIONS = (
    "no reduction of a wrapper was seen, as within torch.compile or if a forward pass includes its backward pass, so "
    "all replicas are compared at the end only"
)
_HOW_TO_CHOOSE = (
    "use SyncMonitor(model, optimizer, on_desync=lambda report: resync(model, optimizer, source=RANK)) in the script, "
    "instead of watching with resync"
)
_IGNORED = "the parameters and buffers that DistributedDataParallel is told to ignore are not compared"
_UNWATCHED = "not all of its ranks are watched; put `-m syncheck watch` in front of the script on every rank"
_RESTRUCTURED = (
    "the models of the ranks hold other tensors at the end, as after one rank has merged an adapter, so the end is not "
    "compared"
)
_UNEQUAL_AVERAGES = "some ranks only have an averaged copy of the model, so averaged copies are not compared"

_DIVIDED = (
    "each rank has an optimizer for a part of the parameters, as with ZeRO, so the states of these optimizers are not "
    "compared"
)


class FullChecks:
    """The comparisons of the wrappers of this process."""

    def __init__(self, watcher: Watcher, settings: WatchSettings) -> None:
        self._watcher, self._settings = watcher, settings
        self.wanted = False
        """Whether the judge of this rank wants a check soon."""
        self.has_ended = False
        """Whether the last end of training was compared, on all sets of ranks."""
        self.reports: list[Report] = []
        self.last_step = 0
        """The number of the last comparison."""
        self.compared: dict[str, float] = {}
        """By clock, the number of the first step after the last comparison."""
        # The process group and the monitor of each set of ranks.
        self._groups: dict[tuple[int, ...], Any] = {}
        self._monitors: dict[tuple[int, ...], tuple[tuple[int, ...], SyncMonitor]] = {}
        self._is_saved = False
        # The folder with the checkpoints, until a line names it.
        self._unnamed_folder = ""
        self._refusals = 0
        self._changes = PassingChanges()
        # The lines that were printed.
        self._printed: set[str] = set()
        # The reductions of all wrappers of each set of ranks: a GAN has two, and a script may wrap a model again.
        self._reductions: Counter[tuple[int, ...]] = Counter()
        # The steps of all optimizers of each set of ranks.
        self._steps: Counter[tuple[int, ...]] = Counter()
        # The wrappers whose training has ended; a script may train again, with another process group.
        self._ended: set[Clock] = set()

    def install(self) -> None:
        """Watch what sends the parameters of the first rank to all ranks."""
        watch_sent_states(partial(self._watcher._guard, self._note_sent))  # noqa: SLF001 - errors stay from the script

    def _note_sent(self, group: Any) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        ranks = tuple(distributed.get_process_group_ranks(group))
        self._watcher.last_steps.note_wrapper(self._watcher.list_layouts(), ranks)

    def add(self, clock: Clock) -> None:
        """Create a process group for the checks. The ranks of a wrapper create it together, and may wait here too."""
        self._watcher.comparing.after_step = False
        self._watcher.last_steps.note_wrapper(self._watcher.list_layouts(), clock.ranks)
        # A model of FSDP2 is in its first backward pass.
        if clock.module is not clock.wrapper:
            self._changes.note_start(clock)
        if clock.ranks not in self._groups:
            if not self._meet(clock, f"start/{clock.name}", _START_SECONDS):
                raise Unusable(_UNWATCHED)
            # Messages of a check must not come between messages of the script.
            self._groups[clock.ranks] = create_group(clock.ranks, timeout=_TIMEOUT)

    def tick(self, clock: Clock) -> None:
        """Check after a reduction, if a check is due. Raises OutOfSync with `raise`."""
        self._reductions[clock.ranks] += 1
        differs_by_design = clock.keeps_gradients_local() or clock.is_joining()
        if self._is_due(clock) and not differs_by_design:
            self._check(clock)
        if self._is_near(clock.ranks):
            self._changes.note_reduction(clock)

    def see_step(self, layout: Layout, is_after: bool) -> None:
        """Observe the parameters of a layout before or after their step, if a periodic check is near."""
        self._steps[layout.clock.ranks] += is_after
        if not is_after:
            self._changes.note_before_step(layout)
            return
        self._changes.forget_reduction(layout)
        if self._is_near(layout.clock.ranks):
            self._changes.note_after_step(layout)

    def _is_near(self, ranks: tuple[int, ...]) -> bool:
        """Whether a periodic check is due within the next reductions. Without a wrapper, there is none."""
        number = self._reductions[ranks]
        period = self._settings.every
        most = _OBSERVED * len(list_wrappers(self._watcher.clocks, ranks))
        is_first = number < _FIRST
        return number > 0 and (is_first or period - number % period <= most)

    def end(self) -> None:
        """Compare once more at the end of training, if all ranks come. Raises OutOfSync with `raise`."""
        distributed: Any = sys.modules["torch.distributed"]
        # Without its process group, a script that has ended already is not compared.
        clocks = list(self._watcher.clocks) if distributed.is_initialized() else []
        are_compared = []
        for clock in clocks:
            is_new = clock.ranks in self._groups and clock not in self._ended
            if is_new and self._has_trained(clock) and not clock.keeps_gradients_local():
                # All wrappers of the same ranks are compared together.
                self._ended.update(ended for ended in clocks if ended.ranks == clock.ranks)
                are_compared.append(self._agree_on_end(clock))
                self.has_ended = all(are_compared)
                if not clock.ticks:
                    self._print_once(_NO_REDUCTIONS)
                if are_compared[-1]:
                    self._watcher.comparing.after_step = True
                    # After the last step, no change is one for a moment.
                    self._changes = PassingChanges()
                    self._check(clock)

    def _has_trained(self, clock: Clock) -> bool:
        """Whether a wrapper has reduced, or an optimizer has stepped with its parameters.

        A compiled program contains no hook, so nothing counts the reductions of a wrapper within `torch.compile`.
        """
        return clock.ticks > 0 or clock in self._watcher.stepping

    def release(self) -> None:
        """Drop the process groups: the script destroys all of them, and each group holds the store of the script."""
        self._monitors.clear()
        self._groups.clear()

    def _agree_on_end(self, clock: Clock) -> bool:
        """Return whether all ranks are at the end, hold their models, and have not changed them since the last step.

        No rank waits long for a failed rank, and all ranks follow the first one.
        """
        board: Any = self._watcher.board
        distributed: Any = sys.modules["torch.distributed"]
        rank, place = distributed.get_rank(), f"end/{clock.name}"
        models = list(map(unwrap, list_wrappers(self._watcher.clocks, clock.ranks)))
        holds_models = bool(models) and self._watcher.last_steps.hold(self._watcher.list_layouts(), clock.ranks)
        # The optimizers of a rank end when Python collects them.
        optimizers = len(self._watcher.list_optimizers(clock.ranks))
        state = [self._reductions[clock.ranks], holds_models, optimizers, _sign(models)]
        board.post(place, {"rank": rank, "state": state})
        if rank == clock.ranks[0]:
            rows = board.wait(place, len(clock.ranks), _END_SECONDS)
            states = [row["state"] for row in rows]
            is_agreed = holds_models and states == len(clock.ranks) * [state]
            if len({signature for *_, signature in states}) > 1:
                self._print_once(_RESTRUCTURED)
            # Without reductions, the steps of the first rank number the comparison on all ranks.
            number = self._reductions[clock.ranks] or self._steps[clock.ranks]
            board.post(f"{place}/decision", {"compares": is_agreed, "number": number})
        decisions = board.wait(f"{place}/decision", 1, 2 * _END_SECONDS)
        if not decisions:
            return False
        decision = decisions[0]
        self._reductions[clock.ranks] = decision["number"]
        return decision["compares"] and self._meet(clock, place, _MEETING_SECONDS)

    def _meet(self, clock: Clock, place: str, seconds: float) -> bool:
        """Return whether all ranks are there. seconds: for the first rank; other ranks wait twice as long."""
        board: Any = self._watcher.board
        distributed: Any = sys.modules["torch.distributed"]
        board.post(f"{place}/present", {})
        if distributed.get_rank() == clock.ranks[0]:
            present = board.wait(f"{place}/present", len(clock.ranks), seconds)
            board.post(f"{place}/begin", {"all": len(present) == len(clock.ranks)})
        return {"all": True} in board.wait(f"{place}/begin", 1, 2 * seconds)

    def _check(self, clock: Clock) -> None:
        """Compare now, unless the parameters of a rank are changed for a moment."""
        changes_pass, averages = self._agree_on_moment(clock)
        if changes_pass:
            self._print_once(_PASSING_CHANGES)
        if changes_pass or self._waits_for_first_step(clock):
            return
        optimizers, are_divided = list_undivided(self._watcher, clock.ranks, Channel(self._groups[clock.ranks]))
        if are_divided:
            self._print_once(_DIVIDED)
        monitor = self._get_monitor(clock, averages, optimizers)
        last_report = monitor.last
        try:
            with options_as_typed(self._settings.prefix):
                if monitor.step(self._reductions[clock.ranks]) is None:
                    # The last reduction was compared before its step; this is after it.
                    monitor.check()
        except UsageError as error:
            # `resync` refuses on all ranks, for example without a majority; the run goes on, and so does watching.
            self._refusals += 1
            if self._refusals <= _MOST_REPEATED:
                self._watcher.print_line(str(error))
        finally:
            # The summary has the report that raises, too.
            if monitor.last is not None and monitor.last is not last_report:
                self.reports.append(monitor.last)
                self.last_step = self._reductions[clock.ranks]
                self._note_compared(clock.ranks)
        self._confirm_saved(clock.ranks)

    def _waits_for_first_step(self, clock: Clock) -> bool:
        """Whether some ranks skipped the steps before the first check, so that their optimizers are not known yet.

        The judge names these ranks after their first step. Then all replicas are compared.
        """
        if self._reductions[clock.ranks] != _FIRST or self._watcher.comparing.after_step:
            return False
        has_optimizer = bool(self._watcher.list_optimizers(clock.ranks))
        known = Channel(self._groups[clock.ranks]).gather(has_optimizer, "optimizers")
        waits = len(set(known.values())) > 1
        self.wanted |= waits
        return waits

    def _confirm_saved(self, ranks: tuple[int, ...]) -> None:
        """Print on the first of some ranks where all of them have saved checkpoints, once."""
        folder, self._unnamed_folder = self._unnamed_folder, ""
        distributed: Any = sys.modules["torch.distributed"]
        if folder and distributed.get_rank() == ranks[0]:
            Reporter().print_text(f"wrote {folder}/ ({len(ranks)} files)")

    def _note_compared(self, ranks: tuple[int, ...]) -> None:
        """Note which steps came before a comparison of the wrappers of some ranks."""
        for clock in self._watcher.clocks:
            if clock.reduces and set(clock.ranks) <= set(ranks):
                # A comparison at a reduction comes before the step of this reduction, that at the end after all steps.
                self.compared[clock.name] = math.inf if self._watcher.comparing.after_step else clock.ticks

    def _agree_on_moment(self, clock: Clock) -> tuple[bool, list[Any]]:
        """Return whether a rank has changed its parameters for a moment, and the averaged copies that all ranks have.

        Many scripts average on the first rank only, which is no difference of the replicas.
        """
        averages: list[Any] = []
        counts = []
        for wrapper in list_wrappers(self._watcher.clocks, clock.ranks):
            averages_of_wrapper = self._watcher.averages.list_of(wrapper)
            averages += averages_of_wrapper
            counts.append(len(averages_of_wrapper))
        states = Channel(self._groups[clock.ranks]).gather((self._changes.exist, tuple(counts)), "moment")
        changes_of_ranks, counts_of_ranks = map(set, zip(*states.values(), strict=True))
        if len(counts_of_ranks) > 1:
            self._print_once(_UNEQUAL_AVERAGES)
            averages = []
        return True in changes_of_ranks, averages

    def _print_once(self, text: str) -> None:
        if text not in self._printed:
            self._printed.add(text)
            self._watcher.print_line(text)

    def _is_due(self, clock: Clock) -> bool:
        number = self._reductions[clock.ranks]
        is_planned = self._is_planned(clock, number)
        return is_planned or number == _FIRST or number % self._settings.every == 0

    def _is_planned(self, clock: Clock, number: int) -> bool:
        """Announce or read a plan; return whether a check is planned for this reduction. number: of the reduction."""
        board = self._watcher.board
        if board is None:
            return False
        plan = f"check/{clock.ranks}"
        if self.wanted and number % _PERIOD == _PERIOD - 2:
            self.wanted = False
            board.post(f"{plan}/{number + 2}", {})
            # The store answers after it has the announcement, which other machines must not miss.
            board.read(f"{plan}/{number + 2}")
        if number % _PERIOD:
            return False
        return bool(board.read(f"{plan}/{number}"))

    def _get_monitor(self, clock: Clock, averages: list[Any], optimizers: list[Any]) -> SyncMonitor:
        """Return the monitor of the wrappers and optimizers of some ranks, at the number of a reduction.

        averages: the averaged copies of their models.
        """
        wrappers = list_wrappers(self._watcher.clocks, clock.ranks)
        models = [*wrappers, *averages]
        ignored = list_ignored(wrappers)
        if ignored:
            self._print_once(_IGNORED)
        outside = self._watcher.list_outside(clock.ranks)
        identities = tuple(map(id, (*models, *outside.values(), *optimizers)))
        if outside:
            models.append(outside)
        events = self._settings.events
        last_monitor = self._monitors.get(clock.ranks)
        # A GAN creates its wrappers one after the other; optimizers appear at their first step, averages later.
        if last_monitor is None or last_monitor[0] != identities:
            monitor = SyncMonitor(
                _simplify(models),
                _simplify(optimizers),
                # When a check is due is decided here.
                every=1,
                on_desync=self._choose_action(clock, wrappers, self._watcher.list_optimizers(clock.ranks)),
                group=self._groups[clock.ranks],
                start=max(self._reductions[clock.ranks] - 1, 0),
                events=events and name_file_of_judge(events, clock.ranks[0]),
                only=self._settings.only,
                include=self._settings.include,
                exclude=(*self._settings.exclude, *ignored),
                allow=self._settings.allow,
            )
            if last_monitor is not None:
                monitor.continue_from(last_monitor[1])
            monitor.comparing = self._watcher.comparing
            # The last line has the numbers of all checks.
            monitor.most_repeated = _MOST_REPEATED
            monitor.how_to_choose = _HOW_TO_CHOOSE
            last_monitor = self._monitors[clock.ranks] = (identities, monitor)
        return last_monitor[1]

    def _choose_action(self, clock: Clock, wrappers: list[Any], optimizers: list[Any]) -> Any:
        if self._settings.on_desync != "save":
            return self._settings.on_desync
        return self._make_saver(clock, wrappers, optimizers)

    def _make_saver(self, clock: Clock, wrappers: list[Any], optimizers: list[Any]) -> Callable[[Report], None]:
        """Return an action that saves one checkpoint per rank at the first desync."""

        def save(_report: Report) -> None:
            if self._is_saved:
                return
            self._is_saved = True
            torch: Any = sys.modules["torch"]
            distributed: Any = sys.modules["torch.distributed"]
            rank, ranks = distributed.get_rank(), distributed.get_world_size()
            folder = self._unnamed_folder = os.path.join(SAVE_FOLDER, f"step_{self._reductions[clock.ranks]}")
            os.makedirs(folder, exist_ok=True)
            content: dict[str, Any] = {}
            models = list(map(unwrap, wrappers))
            for number, model in enumerate(models):
                content[_number_name("model", number)] = model.state_dict()
            for number, optimizer in enumerate(optimizers):
                content[_number_name("optimizer", number)] = read_optimizer(optimizer)
            content["syncheck"] = metadata(
                model=models[0],
                run="watch",
                rank=rank,
                world_size=ranks,
            )
            # A file of an earlier run is not overwritten; the error ends watching with one line, and the run goes on.
            with open(os.path.join(folder, f"rank_{rank}.pth"), "xb") as file:
                torch.save(content, file)

        return save


def _sign(models: Sequence[Any]) -> str:
    """Return a digest of the names of all tensors of models."""
    digest = hashlib.blake2b(digest_size=8)
    for model in models:
        for name, _ in (*model.named_parameters(), *model.named_buffers()):
            digest.update(f"{name}\n".encode())
    return digest.hexdigest()


def _number_name(name: str, number: int) -> str:
    """Return the key of an object in a saved checkpoint: the first one of its kind has no number."""
    return f"{name}{number}" if number else name


def _simplify(objects: list[Any]) -> Any:
    """Return None, the only object, or all of them."""
    if len(objects) < 2:
        return objects[0] if objects else None
    return tuple(objects)
