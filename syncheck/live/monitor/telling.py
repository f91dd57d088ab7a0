"""How a monitor tells of its checks: lines for people, a file of events, scalars. One rank of the group does so.

What tells may fail, as a full disk does, and on that rank alone. It is then left out from there on, and never stops
the training.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncheck.errors import brief, one_line
from syncheck.report import words
from syncheck.report.parts import Labels, Line, Span, line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from syncheck.records import Finding, Report
    from syncheck.report.parts import Part

_STYLES = {"in_sync": "green", "out_of_sync": "bold red", "undecided": "yellow", "alone": "yellow"}
_MOST_FINDINGS = 3
_SENTENCE = 600  # characters


@dataclass(frozen=True, slots=True)
class Checked:
    """One check, as it is told.

    step: optimizer steps done. ranks: how many took part. seconds: of the check, waiting for other ranks included.
    overhead: share of the wall time spent in checks so far. good: the last step that was in sync before, None where
    there was none. since: the step at which the ranks were first seen apart, None where they are in sync. new:
    findings that were not there at the check before.
    """

    step: int
    report: Report
    ranks: int
    seconds: float
    overhead: float
    good: int | None
    since: int | None
    new: tuple[Finding, ...]

    @property
    def codes(self) -> str:
        """Codes of the findings that make the ranks out of sync, with their ranks, in one line."""
        failing = [finding for group in self.report.groups for finding in group.findings if finding.fails]
        return "; ".join(f"{f.code} {f.slug} on {words.ranks_label(f.ranks)}" for f in failing)


class Teller:
    """Tells of checks on the one rank of a group that does, and swallows what goes wrong with it.

    console: a rich Console, None for one on stderr, False for none. events: path of a JSONL file to append to.
    writer: has `add_scalar(tag, value, step)`, as TensorBoard's SummaryWriter.
    """

    def __init__(self, console: Any = None, events: Any = None, writer: Any = None) -> None:
        self._console, self._events, self._writer = console, events, writer
        self._broken: set[str] = set()

    def say(self, text: str, style: str = "") -> None:
        """Print a text for people; further lines of it are details."""
        first, *more = text.splitlines() or [""]
        details = [line(one_line(row.strip()), "", 2) for row in more]
        self._print([_prefixed(Span(one_line(first), style)), *details])

    @contextmanager
    def instead_of_the_log(self) -> Iterator[None]:
        """Keep what is logged meanwhile, and told here too, from being printed twice.

        Where a program has set up no logging, Python prints warnings to stderr; its own handlers get them all the same.
        """
        own = logging.getLogger("syncheck")
        silent = logging.NullHandler()
        if self._console is not False:
            own.addHandler(silent)
        try:
            yield
        finally:
            own.removeHandler(silent)

    def event(self, event: str, **fields: Any) -> None:
        """Append one event to the file, as a JSON object on a line of its own."""
        if self._events is not None:
            row = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
            # Opened for each line: closed at once, it is whole on disk when the next rank dies.
            self._try(f"events={str(self._events)!r}", lambda: _append(self._events, json.dumps(row)))

    def check(self, checked: Checked, *, details: bool) -> None:
        """Tell of a check. details: print new findings with what they saw and how to mend them."""
        self._print(_parts(checked, details))
        report = checked.report
        self.event(
            "check",
            step=checked.step,
            verdict=report.verdict,
            tensors=report.counts.tensors,
            compared=report.counts.compared,
            seconds=round(checked.seconds, 6),
            overhead=round(checked.overhead, 6),
            findings=_rows(finding for group in report.groups for finding in group.findings),
        )
        if checked.new:
            self.event("desync", step=checked.step, in_sync_at=checked.good, findings=_rows(checked.new))
        if self._writer is not None:
            self._try("writer", lambda: _add_scalars(self._writer, checked))

    def _print(self, parts: list[Part]) -> None:
        if self._console is not False:
            self._try("console", lambda: self._drawn(parts))

    def _drawn(self, parts: list[Part]) -> None:
        if self._console is None:
            from rich.console import Console  # where something is printed only

            self._console = Console(stderr=True)
        if self._console.is_terminal:
            from syncheck.report.terminal import make_renderable

            for part in parts:
                self._console.print(make_renderable(part), highlight=False)
        else:
            from syncheck.report.plain import render

            # Whole lines, so that `grep` finds names.
            self._console.print(render(parts), end="", soft_wrap=True, markup=False, highlight=False)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Do what may fail; once it has, say so and leave it out from then on."""
        if what in self._broken:
            return
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a rank that raised alone would leave the others waiting
            self._broken.add(what)
            if what != "console":
                text = f"{what}: {type(error).__name__}: {brief(str(error), 200)}; nothing more is written there"
                self.say(f"warning: {text}", "yellow")


def _append(path: Any, text: str) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def _rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [
        {
            "code": finding.code,
            "slug": finding.slug,
            "severity": finding.severity,
            "allowed": finding.allowed,
            "ranks": list(finding.ranks),
            "tensors": len(finding.tensors),
            "evidence": finding.evidence,
        }
        for finding in findings
    ]


def _add_scalars(writer: Any, checked: Checked) -> None:
    diffs = [diff for group in checked.report.groups for diff in group.tensors if diff.out_of_sync]
    scalars: dict[str, float] = {"seconds": checked.seconds, "overhead": checked.overhead}
    if checked.report.verdict in ("in_sync", "out_of_sync"):
        scalars |= {"out_of_sync": int(checked.report.verdict == "out_of_sync"), "different": len(diffs)}
        gaps = [abs(diff.max_abs) for diff in diffs if diff.max_abs is not None]
        if gaps or not diffs:
            scalars["max_abs"] = max(gaps, default=0)
    for name, value in scalars.items():
        writer.add_scalar(f"syncheck/{name}", value, checked.step)


def _prefixed(*spans: Span) -> Line:
    return Line((Span("syncheck: ", "dim"), *spans))


def _parts(checked: Checked, details: bool) -> list[Part]:
    """Draw a check: a line, and below it the findings that are new."""
    report = checked.report
    counts = report.counts
    cost = f"{checked.seconds * 1e3:.3g} ms, overhead {checked.overhead:.2%}"
    verdict, more = words.VERDICTS[report.verdict].lower(), ""
    if report.verdict == "out_of_sync":
        verdict = words.VERDICTS[report.verdict]
        more = f" ({_when(checked)}): {checked.codes}"
    elif report.verdict == "in_sync":
        verdict = words.verdict_line(report).replace(words.VERDICTS["in_sync"], verdict)
    first = _prefixed(
        Span(f"step {checked.step}: "),
        Span(verdict, _STYLES[report.verdict]),
        Span(one_line(f"{more}; {counts.compared} of {counts.tensors} tensors compared on {checked.ranks} ranks")),
        Span(f", {cost}", "dim"),
    )
    parts: list[Part] = [first]
    if details and checked.new:
        for finding in checked.new[:_MOST_FINDINGS]:
            parts += _finding(finding)
        if len(checked.new) > _MOST_FINDINGS:
            parts.append(line(f"... and {len(checked.new) - _MOST_FINDINGS} more findings", "dim", 2))
    return parts


def _when(checked: Checked) -> str:
    if checked.since is not None and checked.since != checked.step:
        return f"{'' if checked.new else 'still, '}since step {checked.since}"
    return "at the first check" if checked.good is None else f"in sync at step {checked.good}"


def _finding(finding: Finding) -> list[Part]:
    rows = [
        ("what", one_line(finding.evidence)[:_SENTENCE]),
        ("fix", one_line(str(finding.fix))),
        ("more", f"syncheck explain {finding.code}"),
    ]
    return [line(words.finding_title(finding), "bold", 2), Labels(tuple(rows), indent=4)]
