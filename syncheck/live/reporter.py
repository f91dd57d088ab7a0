"""Output of a monitor on one rank of the group: console lines, an event file, and scalars.

Output may fail on this rank alone, for example on a full disk. A failing output is disabled and never stops the
training.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from syncheck.frozen import record
from syncheck.live.channel import world_size
from syncheck.readers import outputs
from syncheck.report import finding_text, words
from syncheck.report.events import describe_check, describe_findings
from syncheck.report.parts import Labels, Line, Span, line
from syncheck.report.selections import list_codes
from syncheck.report.unbroken import escape_marked, write_unbroken
from syncheck.text import brief, one_line, option_text, ranks_as_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from syncheck.records import Finding, Report, TensorDiff
    from syncheck.report.parts import Part

_STYLES = {"in_sync": "green", "out_of_sync": "bold red", "undecided": "yellow", "alone": "yellow"}
_MOST_FINDINGS = 3
_SENTENCE = 600  # characters


@record
class CheckRecord:
    """One check to report.

    step: optimizer steps so far.
    seconds: duration, including waiting for other ranks.
    overhead: fraction of the wall time in checks so far.
    last_good: the last earlier step in sync, or None.
    since: the first step out of sync, None while in sync.
    new: findings with a new code, new ranks, or new tensors or values.
    grown: the new findings whose code and ranks are known.
    """

    step: int
    report: Report
    seconds: float
    overhead: float
    last_good: int | None
    since: int | None
    new: tuple[Finding, ...]
    grown: tuple[Finding, ...] = ()


def _import_rich() -> None:
    """Import rich now, in the thread of the script: its import draws a random number, which is given back."""
    state = random.getstate()
    importlib.import_module("rich.console")
    random.setstate(state)


class Reporter:
    """Reports checks on one rank of a group, and ignores output errors.

    console: a rich Console, None for stderr, False for no output. events: path of a JSONL file to append to. writer:
    has `add_scalar(tag, value, step)`, like TensorBoard's SummaryWriter.
    """

    def __init__(self, console: Any = None, events: Any = None, writer: Any = None) -> None:
        self._console, self._events, self._writer = console, events, writer
        # A console of the script draws its own progress bars around messages.
        self._shares_line = console is None
        _import_rich()
        self._broken: set[str] = set()
        self._protected = False  # whether the path of the events was checked

    def print_text(self, text: str, style: str = "") -> None:
        """Print a text; its lines after the first are details."""
        first, *more = text.splitlines() or [""]
        details = [line(one_line(row.strip()), "", 2) for row in more]
        self._print([_make_line(Span(one_line(first), style)), *details])

    def print_finding(self, finding: Finding, when: str) -> None:
        """Print a finding with its evidence, cause and fix. when: the time, such as 'step 5'."""
        title = finding_text.finding_title(finding)
        style = "bold red" if finding.fails else "yellow"
        rows = [
            ("what", one_line(finding.evidence)[:_SENTENCE]),
            ("why", one_line(finding_text.cause_text(finding))),
            ("fix", escape_marked(finding.fix.render(write_unbroken))),
        ]
        self._print([_make_line(Span(f"{when}: "), Span(one_line(title), style)), Labels(tuple(rows), indent=4)])

    @contextmanager
    def hide_log_output(self) -> Iterator[None]:
        """Suppress log messages printed by this reporter too.

        Without logging configuration, Python prints warnings to stderr. Handlers of the program still get the messages.
        """
        logger = logging.getLogger("syncheck")
        # Python prints warnings itself only if no handler gets them.
        silent = logging.NullHandler()
        if self._console is not False:
            logger.addHandler(silent)
        try:
            yield
        finally:
            logger.removeHandler(silent)

    def write_event(self, event: str, **fields: Any) -> None:
        """Append one event to the file, as one line of JSON."""
        if self._events is not None:
            row = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
            # Reopened for each line, so that the line is on disk if the process dies.
            self._try(option_text("events", str(self._events)), lambda: self._append_event(json.dumps(row)))

    def _append_event(self, row: str) -> None:
        path = os.fspath(self._events)
        if not self._protected:  # once, because listing the folder takes time
            outputs.protect(path, outputs.EVENTS)
            self._protected = True
        outputs.append_line(path, row)

    def report_check(self, record: CheckRecord, *, details: bool, is_printed: bool = True) -> None:
        """Report a check. details: print the evidence and the fix of new findings. is_printed: not only written."""
        if is_printed:
            self._print(_render_check(record, details))
        report = record.report
        self.write_event(
            "check",
            step=record.step,
            verdict=report.verdict,
            tensors=report.counts.tensors,
            compared=report.counts.compared,
            seconds=round(record.seconds, 6),
            overhead=round(record.overhead, 6),
            findings=describe_findings(report.findings, report),
            **describe_check(report),
        )
        # A desync that continues is written once, and each check has the verdict.
        if record.new:
            new = describe_findings(record.new, report)
            self.write_event(
                "desync",
                step=record.step,
                in_sync_at=record.last_good,
                findings=new,
            )
        if self._writer is not None:
            self._try("writer", lambda: _add_scalars(self._writer, record))

    def _print(self, parts: list[Part]) -> None:
        if self._console is not False:
            self._try("console", lambda: self._draw(parts))

    def _draw(self, parts: list[Part]) -> None:
        if self._console is None:
            from rich.console import Console  # imported only to print

            self._console = Console(stderr=True)
        if self._console.is_terminal:
            from syncheck.report.terminal import make_renderable, start_line

            # In one piece, because other processes write to the terminal, too.
            with self._console:
                if self._shares_line:
                    start_line(self._console)
                for part in parts:
                    self._console.print(make_renderable(part), highlight=False)
        else:
            from syncheck.report.plain import render

            # Unwrapped lines, so that `grep` finds names.
            self._console.print(
                render(parts),
                end="",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )

    def _try(self, output: str, work: Callable[[], None]) -> None:
        """Run an output that may fail; after a failure, warn and disable it."""
        if output in self._broken:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a rank that raises alone leaves the others waiting
            self._broken.add(output)
            # A broken console cannot print the warning either.
            if output != "console":
                text = f"{output}: {type(error).__name__}: {brief(str(error), 200)}; this output is disabled"
                self.print_text(f"warning: {text}", "yellow")


def _add_scalars(writer: Any, record: CheckRecord) -> None:
    scalars: dict[str, float] = {"seconds": record.seconds, "overhead": record.overhead}
    verdict = record.report.verdict
    if verdict in ("in_sync", "out_of_sync"):
        scalars["out_of_sync"] = int(verdict == "out_of_sync")
        scalars |= _measure_differences(record.report)

    for name, value in scalars.items():
        writer.add_scalar(f"syncheck/{name}", value, record.step)


def _measure_differences(report: Report) -> dict[str, float]:
    """Return the number of differing tensors and the largest difference, if it was measured."""
    diffs: list[TensorDiff] = []
    for group in report.groups:
        diffs += [diff for diff in group.tensors if diff.out_of_sync]

    # Tensors beyond the budget differ without a measured difference.
    scalars: dict[str, float] = {"different": len(diffs)}
    differences = [abs(diff.max_abs) for diff in diffs if diff.max_abs is not None]
    if differences or not diffs:
        scalars["max_abs"] = max(differences, default=0)

    return scalars


def _make_line(*spans: Span) -> Line:
    return Line((Span("syncheck: ", "dim"), *spans))


def _render_check(record: CheckRecord, details: bool) -> list[Part]:
    """Render a check: one line, and below it the new findings."""
    report = record.report
    counts, ranks = report.counts, report.groups[0].ranks
    # Several sets of replicas have lines of their own.
    ranks_compared = f"{len(ranks)} ranks"
    if len(ranks) < world_size():
        ranks_compared = ranks_as_ranges(ranks)
    verdict, reason = _describe_verdict(record)
    parts: list[Part] = [
        _make_line(
            Span(f"step {record.step}: "),
            Span(verdict, _STYLES[report.verdict]),
            Span(one_line(f"{reason}; {counts.compared} of {counts.tensors} tensors compared on {ranks_compared}")),
            Span(f", {record.seconds * 1e3:.3g} ms, overhead {record.overhead:.2%}", "dim"),
        )
    ]
    if details:
        for finding in record.new[:_MOST_FINDINGS]:
            parts += _render_finding(finding)

        if len(record.new) > _MOST_FINDINGS:
            parts.append(line(f"... and {len(record.new) - _MOST_FINDINGS} more findings", "dim", 2))

    return parts


def _describe_verdict(record: CheckRecord) -> tuple[str, str]:
    """Return the verdict, and the time and codes of failing findings."""
    report = record.report
    verdict = words.VERDICTS[report.verdict]
    if report.verdict == "out_of_sync":
        codes = []
        for finding in report.findings:
            if finding.fails:
                codes.append(f"{finding.code} {finding.slug} on {ranks_as_ranges(finding.ranks)}")
        return verdict, f" ({_format_time(record)}): {'; '.join(codes)}"

    # Capitals are for verdicts that fail.
    lowered = verdict.lower()
    if report.verdict == "in_sync":
        lowered = words.verdict_line(report, verdict=lowered)

    return lowered, ""


def _format_time(record: CheckRecord) -> str:
    """Return since when the ranks are out of sync, and which findings are new."""
    if record.since is None or record.since == record.step:
        return "at the first check" if record.last_good is None else f"in sync at step {record.last_good}"

    text = f"since step {record.since}"
    # Findings that are new at a later step did not begin with the first ones.
    codes = list_codes(record.new)
    grown_codes = list_codes(record.grown)
    for code in grown_codes:
        codes.remove(code)
    text = f"{text}, new: {', '.join(codes)}" if codes else f"still, {text}"
    if grown_codes:
        text += f", in more tensors or values: {', '.join(grown_codes)}"
    return text


def _render_finding(finding: Finding) -> list[Part]:
    rows = [
        ("what", one_line(finding.evidence)[:_SENTENCE]),
        ("why", one_line(finding_text.cause_text(finding))),
        ("fix", escape_marked(finding.fix.render(write_unbroken))),
        ("more", finding_text.more_text(finding)),
    ]
    return [line(finding_text.finding_title(finding), "bold", 2), Labels(tuple(rows), indent=4)]
