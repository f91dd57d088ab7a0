"""Check the ranks of a training run every N optimizer steps, and act if they are out of sync."""

from __future__ import annotations

import inspect
import math
import operator
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from syncheck.api import Options
from syncheck.errors import RankFailed, SyncheckError, UsageError
from syncheck.live.channel import MAX_VALUES, Channel, world_size
from syncheck.live.checks import check, group_of, list_allowed, make_options, run_check
from syncheck.live.desync_state import DesyncState
from syncheck.live.reporter import CheckRecord, Reporter
from syncheck.messages import Note
from syncheck.records import OutOfSync, Report
from syncheck.report.selections import find_failing
from syncheck.text import brief, group_ranks, option_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from syncheck.live.watching.session import Session

    Action = Literal["raise", "warn", "resync"] | Callable[[Report], object]


class _Settings(NamedTuple):
    """The settings of a monitor that must be equal on all ranks, and its step."""

    step: int
    every: int
    on_desync: str
    stop_at: str


def check_agreement(channel: Channel, settings: _Settings) -> None:
    """Raise on all ranks unless they are at the same step with equal settings. settings: of this rank."""
    by_rank: dict[int, _Settings] = channel.gather(settings, "monitor")
    for name in ("every", "on_desync", "stop_at"):
        values = {rank: getattr(settings_of_rank, name) for rank, settings_of_rank in by_rank.items()}
        if len(set(values.values())) > 1:
            raise UsageError(f"{name}= differs between ranks: {_format_by_value(values)}")

    steps = {rank: settings_of_rank.step for rank, settings_of_rank in by_rank.items()}
    if len(set(steps.values())) > 1:
        raise RankFailed(
            f"the monitors are at different steps: {_format_by_value(steps)}; call step() on every rank once after "
            "each optimizer step, with the same step= if any"
        )


def _format_by_value(values: Mapping[int, object]) -> str:
    """Format values by rank: '5 on rank 0, 10 on ranks 1, 2'."""
    ranks_by_value = group_ranks(dict(sorted(values.items())))
    texts = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items()]
    return ", ".join(texts[:MAX_VALUES])


def call_on_all_ranks(channel: Channel, action: Callable[[Report], object], report: Report) -> None:
    """Call a function on every rank. If it raises on some ranks only, the other ranks raise RankFailed."""
    try:
        action(report)
    except (Exception, SystemExit) as error:
        # If other ranks have exited, the error of this rank matters more.
        with suppress(SyncheckError):
            channel.gather(f"{type(error).__name__}: {brief(str(error), 200)}", "on_desync")
        raise

    errors = channel.gather("", "on_desync")
    failed = {rank: text for rank, text in errors.items() if text}
    if failed:
        raise RankFailed(f"on_desync raised {_format_by_value(failed)}")


ACTIONS = ("raise", "warn", "resync")
_STOPPING = ("error", "warning")
_HOW_TO_CHOOSE = "pass on_desync=lambda report: resync(model, optimizer, source=RANK)"
_ALONE = "the process group has no other rank to compare with"
_NO_GROUP = "no process group to compare across; call torch.distributed.init_process_group() on every rank"


class SyncMonitor:
    """Checks every `every` optimizer steps that all ranks hold the same model.

    Create it on every rank, with equal arguments.

    model, optimizer, scaler, group and checking (only=, include=, exclude=, allow=, ...): as in `syncheck.live.check`.
    start: optimizer steps before this run, if it resumes from a checkpoint.

    on_desync: the action on all ranks if they are out of sync. "raise": raise `syncheck.OutOfSync`, whose `report` has
    all details. "warn": rank 0 prints the findings. "resync": `syncheck.live.resync` repairs the differing ranks;
    UsageError if it refuses. Or a function, called with the report on every rank at every check that fails; if it
    raises on some ranks only, the other ranks raise RankFailed, so that no rank continues alone.

    stop_at: the least severity that stops the run. With "error", "raise" prints findings that are only warnings, like
    BatchNorm's local statistics (SYN201), and continues; so does "resync" if it cannot repair them. With "warning",
    they stop the run too. A function of the report decides on its own.

    The group's first rank reports each check: a line on `console` (a rich Console; None for stderr; False for no
    output), an object in the JSONL file `events`, and scalars to `writer`, an object with TensorBoard's
    `add_scalar(tag, value, step)`. If a report cannot be written, for example on a full disk, the training continues.

    witnesses: what is observed at every step between the checks, as in `syncheck.live.watch`: gradients after the
    reduction, batches, random numbers, settings. With on_desync="raise", a finding stops all ranks before the step.

    As a context manager it checks once more at the end, if steps followed the last check. After an exception it does
    not, because other ranks may have exited.

    It draws no random number and changes nothing except with "resync". Raises UsageError for invalid arguments.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        scaler: Any = None,
        *,
        every: int = 100,
        on_desync: Action = "raise",
        stop_at: Literal["error", "warning"] = "error",
        group: Any = None,
        start: int = 0,
        events: Any = None,
        writer: Any = None,
        console: Any = None,
        witnesses: Sequence[str] = (),
        **checking: Any,
    ) -> None:
        self._checking = checking
        _check_arguments(every, on_desync, start, writer, console, checking)
        if stop_at not in _STOPPING:
            raise UsageError(f"stop_at={brief(stop_at)}: must be {' or '.join(_STOPPING)}")
        self.checks = 0
        """The number of checks so far."""
        self.last: Report | None = None
        """The report of the last check."""
        self._objects = (model, optimizer, scaler)
        self._cache: dict[Any, Report] = {}
        self._every, self._on_desync, self._group = every, on_desync, group
        self._stop_at = stop_at
        self._start = self._step = start
        self._pending = False
        self._checked_at: int | None = None
        self._first_step_end: float | None = None  # by time.perf_counter
        self._check_seconds = 0.0  # seconds in checks since then
        self._state = DesyncState()
        self._reporter = Reporter(console, events, writer)
        self._watching = _start_watching(model, witnesses, self._action, events, checking.get("allow"))
        self.comparing: Any = None
        """What explains differences by findings of witnesses, if ranks are watched: `watching.causes.Comparing`."""
        if self._watching is not None:
            self.comparing = self._watching.watcher.comparing
            # A script calls `step` after the step of the optimizer.
            self.comparing.after_step = True
        self._is_leader: bool | None = None  # whether this rank reports; None before the first check
        self._warned: set[str] = set()  # warnings already printed
        self.most_repeated = math.inf
        """How many checks in a row with the findings of before are printed."""
        self.how_to_choose = _HOW_TO_CHOOSE
        self._repeated = 0
        self._end_written = False  # whether the end event was written

    @property
    def overhead(self) -> float:
        """Fraction of the wall time since the end of the first step spent in checks, 0 to 1.

        An upper bound of the cost: the time of a check includes waiting for slower ranks, and on a GPU for queued work.
        """
        if self._first_step_end is None:
            return 0.0

        elapsed = time.perf_counter() - self._first_step_end
        return min(1.0, self._check_seconds / elapsed) if elapsed > 0 else 0.0

    def step(self, step: int | None = None) -> Report | None:
        """Count one optimizer step; if a check is due, check and return the report.

        Call it once per step on every rank. step: the caller's step number, the same on all ranks. A check is due at
        multiples of `every`, once per number. With a check due, this is a collective call: if a rank never makes it,
        the other ranks wait until the timeout of the process group. Raises RankFailed on all checking ranks if they are
        at different steps, and the errors of `on_desync` and `syncheck.live.check`.
        """
        self._step = self._step + 1 if step is None else _read_integer(step, "step", least=0)
        self._pending = self._step != self._checked_at
        is_due = self._pending and self._step % self._every == 0
        try:
            return self.check() if is_due else None
        finally:
            # The first step is not counted, because it includes warm-up.
            if self._first_step_end is None:
                self._first_step_end, self._check_seconds = time.perf_counter(), 0.0

    def check(self) -> Report:
        """Check now, and return the report. A collective call; raises like `step`."""
        began = time.perf_counter()
        # Programs that also run in a single process need no process group.
        channel = Channel(self._process_group) if world_size() else None
        self._start_events(channel)
        report = self._compare(channel)
        seconds = time.perf_counter() - began
        self._check_seconds += seconds
        self.checks += 1
        if self._watching is not None:
            self._watching.note_checks(self.checks)
        self.last, self._pending, self._checked_at = report, False, self._step
        if channel is None:
            self._warn_once(f"could not tell: {_NO_GROUP}")
        elif len(channel.ranks) < 2:
            self._warn_once(f"could not tell: {_ALONE}")
        else:
            self._report_check(report, seconds)

        if report.verdict == "out_of_sync":
            self._handle_desync(report)

        return report

    def _compare(self, channel: Channel | None) -> Report:
        """Return the report of a check. channel: None without a process group."""
        if channel is None:
            return Report("undecided", ())

        check_agreement(
            channel,
            _Settings(
                step=self._step,
                every=self._every,
                on_desync=self._action,
                stop_at=self._stop_at,
            ),
        )
        report = run_check(
            self._objects,
            self._cache,
            group=self._process_group,
            **self._checking,
        )
        if self.comparing is not None:
            allow = frozenset(list_allowed(self._checking.get("allow")))
            report = self.comparing.explain(report, channel, self._objects, allow)
        return self._state.decide(self._step, report)

    def continue_from(self, earlier: SyncMonitor) -> None:
        """Continue the history of a monitor of other objects of the same run, for example when it was in sync."""
        self._state = earlier._state.continue_with_other_objects()
        self._warned, self._repeated = earlier._warned, earlier._repeated
        self._first_step_end, self._check_seconds = earlier._first_step_end, earlier._check_seconds

    def close(self) -> None:
        """Check once more if steps followed the last check, and end the events. `with` calls this at its end."""
        try:
            if self._pending:
                self.check()
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end(kind.__name__)

    @property
    def _process_group(self) -> Any:
        """The checked process group. As in `check`, a one-dimensional mesh sets it; None for all ranks."""
        mesh = self._checking.get("mesh")
        if self._group is None and mesh is not None:
            return group_of(mesh)

        return self._group

    @property
    def _action(self) -> str:
        return self._on_desync if isinstance(self._on_desync, str) else "callable"

    def _start_events(self, channel: Channel | None) -> None:
        """At the first check, determine whether this rank reports, and start the events."""
        if self._is_leader is not None:
            return

        ranks: tuple[int, ...] = ()
        self._is_leader = True
        if channel is not None:
            ranks, self._is_leader = channel.ranks, channel.is_leader

        if self._is_leader:
            settings = {"every": self._every, "on_desync": self._action, "ranks": sorted(ranks)}
            self._reporter.write_event("start", step=self._start, **settings)

    def _warn_once(self, text: str) -> None:
        if self._is_leader and text not in self._warned:
            self._warned.add(text)
            self._reporter.print_text(f"warning: step {self._step}: {text}", "yellow")

    def _report_check(self, report: Report, seconds: float) -> None:
        new_findings = self._state.update(self._step, report)
        if report.verdict == "undecided":
            from syncheck.report.undecided import undecided_reason

            self._warn_once(f"could not tell: {undecided_reason(report)}")
        if self._is_leader:
            self._print_new_facts(report)
            record = CheckRecord(
                step=self._step,
                report=report,
                seconds=seconds,
                overhead=self.overhead,
                last_good=self._state.last_good,
                since=self._state.since,
                new=new_findings,
                grown=self._state.grown,
            )
            # The text of OutOfSync has the details.
            raises = self._on_desync == "raise" and self._stops(report)
            self._reporter.report_check(record, details=not raises, is_printed=self._is_printed(record))

    def _is_printed(self, record: CheckRecord) -> bool:
        """Count a check whose findings are all known, and return whether it is still printed."""
        is_known = record.report.verdict == "out_of_sync" and not record.new
        # Anything else is printed, and begins a new series.
        self._repeated = is_known * (self._repeated + 1)
        return self._repeated <= self.most_repeated

    def _print_new_facts(self, report: Report) -> None:
        """Print the limits of a verdict: tensors that are not finite, and differences that do not count."""
        from syncheck.report.words import describe_not_finite

        (group,) = report.groups
        for finding in group.findings:
            if not finding.counts:
                self._warn_once(f"{finding.code} {finding.slug} ({finding.certainty}): {finding.evidence}")

        not_finite = describe_not_finite(group)
        if not_finite is not None:
            self._warn_once(str(not_finite))

        # Without their values, which may be new at each check.
        attributes = sorted(value.name for value in group.values if value.kind == "attribute")
        if attributes:
            self._warn_once(str(Note.ATTRIBUTE_NAMES(count=len(attributes), names=tuple(attributes))))

    def _stops(self, report: Report) -> bool:
        """Whether a failing finding is severe enough to stop the run. Equal on all ranks, like the report."""
        severities = {finding.severity for finding in find_failing(report.findings)}
        return self._stop_at == "warning" or "error" in severities

    def _handle_desync(self, report: Report) -> None:
        """Do what `on_desync` demands."""
        stops = self._stops(report)
        if self._on_desync == "raise" and stops:
            from syncheck.report.failure import message

            history = "never in sync before"
            if self._state.last_good is not None:
                history = f"in sync at step {self._state.last_good}"
            raise OutOfSync(f"step {self._step} ({history}): {message(report)}", report)

        if self._on_desync == "resync":
            self._resync(stops=stops)
        elif callable(self._on_desync):
            call_on_all_ranks(Channel(self._process_group), self._on_desync, report)

    def _resync(self, *, stops: bool) -> None:
        """Repair the ranks. stops: whether a refusal stops the run; all ranks refuse together."""
        from syncheck.live.repair import resync
        from syncheck.live.repair.plan import NoMajority

        model, optimizer, scaler = self._objects
        try:
            with self._reporter.hide_log_output():
                result = resync(
                    model,
                    optimizer,
                    scaler,
                    source="majority",
                    group=self._process_group,
                    **self._checking,
                )
        except UsageError as error:
            action = option_text("on_desync", "resync")
            if not stops:
                self._warn_once(f"{action} cannot repair: {error}; these are warnings, so the run continues")
                return
            text = f"step {self._step}: {action} cannot repair: {error}"
            # The cause is of this rank; all ranks raise a UsageError with its text.
            if isinstance(error.__cause__, NoMajority):
                text += f"; to choose the source, {self.how_to_choose}"
            raise UsageError(text) from error
        # The repair ends with a check in sync, so later findings are new.
        self._state = DesyncState(last_good=self._step)
        if self._is_leader:
            self._reporter.print_text(f"step {self._step}: {result.summary}", "bold")
            self._reporter.write_event("resync", step=self._step, summary=result.summary)

    def _end(self, exception: str | None) -> None:
        """Write the end event once. exception: the name of the class of an exception that ended the run."""
        if self._watching is not None:
            self._watching.stop(normally=exception is None)
        if not self._is_leader or self._end_written:
            return

        self._end_written = True
        verdict = None if self.last is None else self.last.verdict
        self._reporter.write_event(
            "end",
            step=self._step,
            verdict=verdict,
            checks=self.checks,
            overhead=round(self.overhead, 6),
            exception=exception,
        )


def _start_watching(
    model: Any, witnesses: Sequence[str], on_desync: str, events: Any, allow: str | Sequence[str] | None
) -> Session | None:
    """Watch every step, if there are witnesses. model: may contain wrappers that exist already."""
    if not witnesses:
        return None
    from syncheck.live.watching.session import start_session  # most monitors have no witnesses
    from syncheck.live.watching.settings import WatchSettings, check_witnesses

    settings = WatchSettings(
        every=0,
        witnesses=check_witnesses(witnesses),
        on_desync="raise" if on_desync == "raise" else "warn",
        allow=list_allowed(allow),
        events=None if events is None else str(events),
    )
    session = start_session(settings)
    for part in model if isinstance(model, tuple) else (model,):
        session.add(part)
    return session


def _check_arguments(
    every: Any, on_desync: Any, start: Any, writer: Any, console: Any, checking: Mapping[str, Any]
) -> None:
    """Raise UsageError for invalid arguments."""
    _read_integer(every, "every", least=1)
    _read_integer(start, "start", least=0)
    is_action = callable(on_desync) or on_desync in ACTIONS
    if not is_action:
        raise UsageError(f"on_desync={brief(on_desync)}: must be {', '.join(ACTIONS)}, or a function of a report")

    # By methods, because neither TensorBoard nor rich is imported here.
    if not _is_output(writer, "add_scalar"):
        raise UsageError(f"writer={brief(writer)}: expected an object with add_scalar(tag, value, step)")

    is_console = console is False or _is_output(console, "print")
    if not is_console:
        raise UsageError(f"console={brief(console)}: expected a rich Console, False for no output, or None for stderr")

    _check_options(checking)


def _is_output(value: Any, method: str) -> bool:
    """Whether an output is the default or has the method to write to it."""
    return value is None or callable(getattr(value, method, None))


def _check_options(checking: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that `check` does not take: now, and not at the first check, hours later."""
    parameters = inspect.signature(check).parameters.values()
    options = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in checking:
        if name not in options:
            raise UsageError(f"{name}=: no such option; syncheck.live.check takes {', '.join(options)}")

    # The other arguments, like mesh=, are checked with all ranks.
    selected = checking.keys() & Options.__dataclass_fields__.keys()
    make_options(**{name: checking[name] for name in selected})


def _read_integer(value: Any, name: str, *, least: int) -> int:
    """Return an integer of any type. Raises UsageError if it is less than `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1

    if number < least:
        raise UsageError(f"{name}={brief(value)}: must be an integer, at least {least}")

    return number
