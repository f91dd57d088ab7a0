"""The watching of one process: the watcher, its threads, and what they print."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Protocol

from syncheck.live.channel import world_size
from syncheck.live.reporter import Reporter
from syncheck.live.watching.board import PAUSE
from syncheck.live.watching.causes import Comparing
from syncheck.live.watching.extent import measure_extent
from syncheck.live.watching.gate import Gate
from syncheck.live.watching.judge import Judge, Judgement, Responder
from syncheck.live.watching.records import RANK
from syncheck.live.watching.summary import Ending, Summary
from syncheck.live.watching.termination import end_flushing, flush_before_termination
from syncheck.live.watching.watcher import Watcher
from syncheck.live.witnesses.batches import BatchWitness
from syncheck.live.witnesses.copies import let_gradients_lead
from syncheck.live.witnesses.gradients import GradientWitness
from syncheck.live.witnesses.parameters import ParameterWitness
from syncheck.live.witnesses.rng import RngWitness
from syncheck.live.witnesses.settings import SettingsWitness
from syncheck.records import OutOfSync
from syncheck.tensors.kinds import make_selector
from syncheck.text import options_as_typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from syncheck.live.watching.board import Board
    from syncheck.live.watching.clock import Clock
    from syncheck.live.watching.layouts import Layout
    from syncheck.live.watching.settings import WatchSettings
    from syncheck.live.witnesses.witness import Witness
    from syncheck.records import Finding, Report

_WITNESS_CLASSES = (GradientWitness, ParameterWitness, BatchWitness, RngWitness, SettingsWitness)
# Looks of the judge for the next record, and seconds in all, at the end of the script. 100 looks take 2 seconds, and
# longer on a busy machine.
_END = (100, 20.0)
# After an error, other ranks may have ended too: only the records that are there count.
_ERROR = (0, 1.0)
# After SIGTERM, launchers wait for 10 or 30 seconds before SIGKILL.
_SIGNAL = (25, 0.5)
# Seconds from SIGTERM to the end of a process about to end by itself.
_SIGNAL_SECONDS = 3.0
# Seconds at the end for the other ranks to answer the judge.
_ANSWER_SECONDS = 4.0
_ALONE = (
    "only one rank is watched, so there is nothing to compare; start several: "
    "torchrun --nproc-per-node 2 -m syncheck watch SCRIPT"
)
_DONE = "done"
_LEFT = "left"
_ENDED = "ended"
# Whether the judge of the rank has a finding that counts.
_FAILED = "failed"
# Of the sessions of this process.
_numbers = count()


class Checks(Protocol):
    """The comparisons of all replicas: `full_checks.FullChecks`.

    wanted: whether the judge wants one soon.
    has_ended: whether the end of training was compared.
    last_step: the number of the last comparison; 0 without one.
    reports: so far.
    compared: the number of the first step after the last comparison, by clock.
    """

    wanted: bool
    has_ended: bool
    last_step: int
    reports: list[Report]
    compared: dict[str, float]

    def install(self) -> None:
        """Install hooks."""

    def add(self, clock: Clock) -> None:
        """Prepare the comparisons of a new wrapper."""

    def tick(self, clock: Clock) -> None:
        """Compare after a reduction, if it is due."""

    def see_step(self, layout: Layout, is_after: bool) -> None:
        """Observe the parameters of a layout before or after their step."""

    def end(self) -> None:
        """Compare at the end of training."""

    def release(self) -> None:
        """Give back the process groups, before the script destroys all of them."""


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
        # Set at the end of `finish`.
        self._is_over = threading.Event()
        # Whether the judge of another rank has a finding that counts, as far as this rank knows.
        self._has_judge_failed = False
        # The sessions of a process are the same on all ranks.
        self._ended_key = f"{_ENDED}/{next(_numbers)}"
        # Whether a thread prints the last line.
        self._is_concluded = False
        self._reporter = Reporter(events=settings.events)
        self._summary = Summary(self._reporter, settings)
        self._judge: Judge | None = None
        self._responder: Responder | None = None
        self._checks: Checks | None = None
        self.has_children = False
        """Whether the script has started processes, which are watched on their own."""
        # Whether a line says that one process trains alone.
        self._is_explained = False
        self.watcher: Watcher

    @property
    def findings(self) -> list[Finding]:
        """What the witnesses found so far, on the first rank of each wrapper; empty on the other ranks."""
        return list(self._summary.findings.values())

    def note_checks(self, count: int) -> None:
        """Note how often a monitor of this session has compared all replicas."""
        self._summary.monitor_checks = count

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
        if code != 0 or not self.settings.strict:
            return code
        # Comparisons have failed on all of their ranks.
        if has_failed and self._judge is not None:
            self._reporter.print_text("the exit code is 1, because of findings (--strict)", "bold red")
        return int(has_failed or self._has_judge_failed)

    def print_advice(self, advice: str | None) -> None:
        """Print what the user can do after an error of the script, if there is anything."""
        if advice is not None:
            self._reporter.print_text(advice, "yellow")

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
        let_gradients_lead(witnesses)
        # The names are the same at each step.
        is_selected = cache(make_selector(frozenset(), self.settings.include, self.settings.exclude))
        for name in witnesses.keys() & {GradientWitness.name, ParameterWitness.name}:
            copies: Any = witnesses[name]
            copies.is_selected = is_selected
        self.watcher = Watcher(witnesses, self._print_on_first_rank, self._begin_answering)
        self.watcher.on_first_step = self._begin_judging
        self.watcher.on_alone = self._explain_alone
        self.watcher.comparing = Comparing(self.watcher, self._summary.causes)
        if self.settings.every and self._make_checks is not None:
            self._checks = self._make_checks(self.watcher, self.settings)
            self._checks.install()
            self._summary.reports = self._checks.reports
            self._summary.compared = self._checks.compared
            self.watcher.on_wrapper = self._checks.add
            self.watcher.on_tick = self._checks.tick
            self.watcher.on_optimizer = self._checks.see_step
            self.watcher.on_end = self._checks.end
            self.watcher.on_destroy = self._checks.release
        if self.settings.on_desync == "raise":
            allow = frozenset(self.settings.allow)
            self.watcher.on_step = Gate(self.watcher, self.settings.patience, allow, self._report).pass_step
        self.watcher.install()
        flush_before_termination(self._flush, self._is_ending)

    def _explain_alone(self) -> None:
        """Print at the first step of a single process that nothing is compared, unless a launcher started more."""
        if int(os.environ.get("WORLD_SIZE", "1")) < 2 and not self._is_explained:
            self._is_explained = True
            self._print_on_first_rank(_ALONE)

    def _is_ending(self) -> bool:
        """Whether the main thread has begun to end watching, and has not printed the last line yet."""
        return self._has_ended and not self._is_over.is_set()

    def _flush(self) -> None:
        """Judge the posted steps: the process is about to end by SIGTERM."""
        if self._judge is None:
            return
        if self._has_ended:
            # The main thread prints the last line.
            self._judge.hasten(*_SIGNAL)
            self._is_over.wait(_SIGNAL_SECONDS)
        # The main thread may wait for a rank that has ended, in the comparison at the end.
        if self._is_concluded:
            return
        self._judge.finish(*_SIGNAL)
        self._conclude(self._judge, is_complete=self.watcher.is_on, normally=False)

    def finish(self, *, normally: bool) -> bool:
        """Judge the last steps, and end all threads; return whether this rank saw a finding that counts.

        normally: the script ended without an error.
        """
        self._has_ended = True
        try:
            self._end_watching(normally=normally)
        finally:
            self._is_over.set()
            end_flushing()
        return self._summary.has_failed

    def _end_watching(self, *, normally: bool) -> None:
        if self in _running:
            _running.remove(self)
        if normally:
            # The script is over: the finding is in the summary.
            with suppress(OutOfSync):
                self.watcher.tell_end()
        if self.watcher.last_board is not None:
            self._tell_ended(self.watcher.last_board)
        # An error of syncheck may have ended watching before.
        is_complete = self.watcher.is_on
        self.watcher.is_on = False
        reasons = (
            self.watcher.has_posted,
            self.has_children,
            self._is_explained,
            # An error has its own message.
            not normally,
            not is_complete,
        )
        if not any(reasons):
            self._print_on_first_rank(_explain_nothing())
        if self._responder is not None:
            self._end_judging(normally=normally, is_complete=is_complete)
            self._leave(self._responder, wait=normally)

    def _end_judging(self, *, normally: bool, is_complete: bool) -> None:
        self._is_concluded = True
        if self._judge is not None:
            self._judge.ended_key = self._ended_key
            self._judge.finish(*(_END if normally else _ERROR))
            self._conclude(self._judge, is_complete=is_complete, normally=normally)

    def _conclude(self, judge: Judge, *, is_complete: bool, normally: bool) -> None:
        """Print and write what the run has shown."""
        with options_as_typed(self.settings.prefix):
            self._describe_run(judge, is_complete=is_complete, normally=normally)

    def _describe_run(self, judge: Judge, *, is_complete: bool, normally: bool) -> None:
        extent = measure_extent(judge.layouts["steps"].values(), judge.steps)
        gradients: Any = self.watcher.witnesses.get(GradientWitness.name)
        ending = Ending(
            judged=judge.judged,
            uncompared=judge.list_uncompared(),
            unjudged=judge.list_unjudged(),
            telling=tuple(sorted(judge.telling)),
            is_complete=is_complete,
            normally=normally,
            ranks=tuple(sorted(judge.ranks)),
            world_size=self.watcher.world_size,
            is_separate=gradients is not None and gradients.messages.are_rare,
            is_compared=self._checks is not None and self._checks.has_ended,
            last_comparison=0 if self._checks is None else self._checks.last_step,
            sees_steps=not extent.reductions,
            extent=extent,
        )
        self._summary.print_end(ending)
        self._summary.write_outputs(min(judge.ranks, default=0))

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
        deadline = time.monotonic() + _ANSWER_SECONDS
        # The process that serves the store may have ended.
        with suppress(RuntimeError):
            responder.board.post(f"{_DONE}/{responder.rank}", {_FAILED: self._summary.has_failed})
            done = [f"{_DONE}/{rank}" for rank in judges]
            _wait_for_keys(responder.board, done, deadline)
            rows = chain(*map(responder.board.read, done))
            self._has_judge_failed = any(row[_FAILED] for row in rows)
        responder.stop()
        with suppress(RuntimeError):
            responder.board.post(f"{_LEFT}/{responder.rank}", {})
            served = responder.board.list_served()
            members |= served
            if served or responder.rank in judges:
                _wait_for_keys(responder.board, [f"{_LEFT}/{rank}" for rank in members], deadline)

    def _tell_ended(self, board: Board) -> None:
        """Post the end of this rank, after its last record."""
        rank = self.watcher.rank
        # The process that serves the store may have ended.
        with suppress(RuntimeError):
            board.post(self._ended_key, {RANK: rank})
            # A rank without records answers no question.
            if self._responder is None:
                board.post(f"{_DONE}/{rank}", {_FAILED: False})
                board.post(f"{_LEFT}/{rank}", {})

    def _begin_answering(self, watcher: Watcher, board: Board) -> None:
        """Answer questions from the first record on, on every rank."""
        distributed: Any = sys.modules["torch.distributed"]
        self._responder = Responder(watcher, board.clone(), distributed.get_rank())
        self._responder.start()

    def _begin_judging(self, board: Board) -> None:
        self._judge = Judge(self.watcher, board.clone(), self._report)
        self._summary.causes.is_judging = self._judge.is_behind
        self._judge.start()

    def _report(self, judgement: Judgement) -> None:
        # In the thread of the judge, or in the script's.
        with options_as_typed(self.settings.prefix):
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
        return _ALONE
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
