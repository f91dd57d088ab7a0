"""The watching of one process: the watcher, its threads, and what they print."""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from syncheck.live.channel import world_size
from syncheck.live.reporter import Reporter
from syncheck.live.watching.board import PAUSE
from syncheck.live.watching.gate import Gate
from syncheck.live.watching.judge import Judge, Judgement, Responder
from syncheck.live.watching.summary import Summary
from syncheck.live.watching.termination import flush_before_termination
from syncheck.live.watching.watcher import Watcher
from syncheck.live.witnesses.batches import BatchWitness
from syncheck.live.witnesses.gradients import GradientWitness
from syncheck.live.witnesses.rng import RngWitness
from syncheck.live.witnesses.settings import SettingsWitness

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.live.watching.board import Board
    from syncheck.live.watching.clock import Clock
    from syncheck.live.watching.settings import WatchSettings
    from syncheck.live.witnesses.witness import Witness
    from syncheck.records import Finding, Report

_WITNESS_CLASSES = (GradientWitness, BatchWitness, RngWitness, SettingsWitness)
# Seconds at the end of the script for the judge to judge the last steps, and for the other ranks to answer it.
_END_SECONDS = 2.0
# Seconds to judge after SIGTERM: launchers wait for 10 or 30 seconds before SIGKILL.
_FLUSH_SECONDS = 0.5
_DONE = "done"
_LEFT = "left"


class Checks(Protocol):
    """The comparisons of all replicas: `full_checks.FullChecks`.

    wanted: whether the judge wants one soon.
    reports: so far.
    """

    wanted: bool
    reports: list[Report]

    def add(self, clock: Clock) -> None:
        """Prepare the comparisons of a new wrapper."""

    def tick(self, clock: Clock) -> None:
        """Compare after a reduction, if it is due."""


class Session:
    """Watches this process: the result of `syncheck.live.watch()`. As a context manager it ends with the block.

    settings: the options.
    make_checks: makes the comparisons of all replicas; None for witnesses only.
    """

    def __init__(
        self,
        settings: WatchSettings,
        make_checks: Callable[[Watcher, WatchSettings], Checks] | None = None,
    ) -> None:
        self.settings = settings
        self._make_checks = make_checks
        self._has_ended = False
        self._reporter = Reporter(events=settings.events)
        self._summary = Summary(self._reporter, settings)
        self._judge: Judge | None = None
        self._responder: Responder | None = None
        self._checks: Checks | None = None
        self.has_children = False
        """Whether the script has started processes, which are watched on their own."""
        self.watcher: Watcher

    @property
    def findings(self) -> list[Finding]:
        """What the witnesses found so far, on the first rank of each wrapper; empty on the other ranks."""
        return list(self._summary.findings.values())

    def add(self, wrapper: Any) -> None:
        """Watch a DistributedDataParallel module that was created before."""
        self.watcher.add_wrapper(wrapper)

    def stop(self, *, normally: bool = True) -> bool:
        """Judge the last steps, print the summary, and watch no longer; return whether a finding counts.

        normally: False after an error. Does nothing the second time.
        """
        return self._summary.has_failed if self._has_ended else self.finish(normally=normally)

    def choose_exit_code(self, code: int) -> int:
        """End watching, and return the exit code: that of the script, or 1 with `strict` for a finding that counts."""
        has_failed = self.stop(normally=code == 0)
        return 1 if code == 0 and self.settings.strict and has_failed else code

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop(normally=kind is None)

    def start(self) -> None:
        """Install the hooks. Imports torch."""
        import torch.distributed  # noqa: F401 - the witnesses read it from sys.modules

        witnesses: dict[str, Witness] = {}
        for witness_class in _WITNESS_CLASSES:
            if witness_class.name in self.settings.witnesses:
                witnesses[witness_class.name] = witness_class()
        self.watcher = Watcher(witnesses, self._print_on_first_rank, self._begin_answering)
        self.watcher.on_first_step = self._begin_judging
        if self.settings.every and self._make_checks is not None:
            self._checks = self._make_checks(self.watcher, self.settings)
            self._summary.reports = self._checks.reports
            self.watcher.on_wrapper = self._checks.add
            self.watcher.on_tick = self._checks.tick
        if self.settings.on_desync == "raise":
            allow = frozenset(self.settings.allow)
            self.watcher.on_step = Gate(self.watcher, self.settings.patience, allow, self._report).pass_step
        self.watcher.install()
        flush_before_termination(self._flush)

    def _flush(self) -> None:
        """Judge the posted steps: the process is about to end by SIGTERM."""
        if self._judge is not None and not self._has_ended:
            self._judge.finish(_FLUSH_SECONDS)
            self._summary.print_end(self._judge.judged, is_complete=self.watcher.is_on)
            self._summary.write_outputs()

    def finish(self, *, normally: bool) -> bool:
        """Judge the last steps, and end all threads; return whether this rank saw a finding that counts.

        normally: the script ended without an error.
        """
        self._has_ended = True
        if self in _running:
            _running.remove(self)
        if normally:
            self.watcher.tell_last_skipped()
        # An error of syncheck may have ended watching before.
        is_complete = self.watcher.is_on
        self.watcher.is_on = False
        if self._responder is not None:
            self._end_judging(normally=normally, is_complete=is_complete)
            self._leave(self._responder, wait=normally)
        elif normally and not self.has_children:
            self._print_on_first_rank(_explain_nothing())
        return self._summary.has_failed

    def _end_judging(self, *, normally: bool, is_complete: bool) -> None:
        if self._judge is not None:
            # After an error, other ranks may have ended too.
            self._judge.finish(_END_SECONDS if normally else 0.0)
            self._summary.print_end(self._judge.judged, is_complete=is_complete)
            self._summary.write_outputs()

    def _leave(self, responder: Responder, *, wait: bool) -> None:
        """End together with the other ranks, if they end in time: judges may ask, and rank 0 may serve the store."""
        if not wait:
            # After an error the store may be gone, and torch would print a warning for each message to it.
            responder.stop()
            return
        judges = {clock.ranks[0] for clock in self.watcher.clocks}
        members: set[int] = set()
        for clock in self.watcher.clocks:
            members.update(clock.ranks)
        deadline = time.monotonic() + 2 * _END_SECONDS
        # The process that serves the store may have ended.
        with suppress(RuntimeError):
            responder.board.post(f"{_DONE}/{responder.rank}", {})
            _wait_for_keys(responder.board, [f"{_DONE}/{rank}" for rank in judges], deadline)
        responder.stop()
        with suppress(RuntimeError):
            responder.board.post(f"{_LEFT}/{responder.rank}", {})
            if responder.rank in judges:
                _wait_for_keys(responder.board, [f"{_LEFT}/{rank}" for rank in members], deadline)

    def _begin_answering(self, watcher: Watcher, board: Board) -> None:
        """Answer questions from the first record on, on every rank."""
        distributed: Any = sys.modules["torch.distributed"]
        self._responder = Responder(watcher, board.clone(), distributed.get_rank())
        self._responder.start()

    def _begin_judging(self, board: Board) -> None:
        self._judge = Judge(self.watcher, board.clone(), self._report)
        self._judge.start()

    def _report(self, judgement: Judgement) -> None:
        finding = self._summary.add(judgement)
        if finding is not None and self._checks is not None:
            self._checks.wanted |= finding.fails

    def _print_on_first_rank(self, text: str) -> None:
        distributed: Any = sys.modules["torch.distributed"]
        rank = os.environ.get("RANK", "0")
        if world_size():
            rank = str(distributed.get_rank())
        if rank == "0":
            self._reporter.print_text(text, "yellow")


def _explain_nothing() -> str:
    """Return why nothing was watched."""
    if max(world_size(), int(os.environ.get("WORLD_SIZE", "1"))) < 2:
        return "nothing to watch: one process trains alone; start several, for example with torchrun"
    return (
        "nothing was watched: no optimizer of torch stepped while a process group existed; processes that the script "
        "starts with subprocess are not watched"
    )


# The session of this process that a script or a monitor has started.
_running: list[Session] = []


def start_session(
    settings: WatchSettings, make_checks: Callable[[Watcher, WatchSettings], Checks] | None = None
) -> Session:
    """Start a session that ends with the program, or return the running session."""
    if not _running:
        session = Session(settings, make_checks)
        session.start()
        _running.append(session)
        # Python notes an error that ends the program, before it calls this.
        atexit.register(lambda: session.stop(normally=getattr(sys, "last_value", None) is None))
    return _running[0]


def _wait_for_keys(board: Board, keys: list[str], deadline: float) -> None:
    """Wait until all keys are on the board, until a time of time.monotonic()."""
    missing = list(keys)
    while missing and time.monotonic() < deadline:
        missing = [key for key in missing if not board.read(key)]
        time.sleep(PAUSE)
