"""The last block of a text report, which fits on a terminal of 80 x 24: verdict, findings, counts, and omissions."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from syncheck.report import finding_text, words
from syncheck.report.parts import Line, Span, line, lines
from syncheck.report.selections import SEVERITIES, find_groups
from syncheck.text import SIDES, one_line, ranks_text, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from syncheck.records import Finding, Report
    from syncheck.report.parts import Part

STYLES = {"in_sync": "bold green", "out_of_sync": "bold red", "undecided": "bold yellow", "alone": "dim"}
SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
# Columns of the narrowest terminal, and of pipes and files, whose readers have some terminal too.
WIDTH = 80
_MOST_FINDINGS = 8
# Characters of a cause before it is cut: one may quote a long value of a file.
_MOST_CAUSE = 1000
_MOST_RANKS_TEXT = 25
# Lines of an omission, whose paths are cut.
_MOST_LINES = 2
_INDENT = 2


class _Row:
    """One line of the summary: a finding of all groups that have it with the same certainty."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.importance = not finding.fails, SEVERITIES.index(finding.severity)
        self.ranks: set[int] = set()
        self.tensors = 0
        self.values = 0
        self.groups = 0

    def add(self, finding: Finding) -> None:
        """Add the finding of one more group."""
        self.ranks.update(finding.ranks)
        self.tensors += len(finding.tensors)
        self.values += len(finding.values)
        self.groups += 1

    def list_cells(self) -> list[str]:
        """Return code, ranks, tensors and certainty."""
        return [self.finding.code, self._describe_ranks(), self._describe_tensors(), self._describe_certainty()]

    def _describe_ranks(self) -> str:
        # The findings of two models have no ranks.
        if not self.ranks:
            return ranks_text(SIDES)
        return shorten(ranks_text(sorted(self.ranks)), _MOST_RANKS_TEXT)

    def _describe_tensors(self) -> str:
        counts = []
        if self.tensors:
            counts.append(words.count_text(self.tensors, "tensor"))
        if self.values:
            counts.append(words.count_text(self.values, "value"))
        text = ", ".join(counts)
        if self.groups > 1:
            text += f" in {self.groups} groups"
        return text.strip()

    def _describe_certainty(self) -> str:
        # An ignored finding must not read as a reason of the verdict.
        ignored = finding_text.why_ignored(self.finding)
        if self.finding.severity == "info":
            ignored = " (info)"
        return f"{self.finding.certainty}{ignored}"


def summarize(report: Report, *, width: int = WIDTH, verbose: bool = False) -> list[Part]:
    """Return the summary of a report.

    width: columns of a line; longer facts are cut. verbose: print all findings and omissions, however many lines they
    take.
    """
    parts: list[Part] = [line(words.verdict_line(report), STYLES[report.verdict])]
    failing = find_groups(report.groups, "out_of_sync")
    if failing and len(report.groups) > 1:
        text = f"{len(failing)} of {len(report.groups)} groups out of sync, the first: {failing[0].name}"
        parts.append(line(_cut(text, width)))
    parts += lines(words.first_lines(report), style_of_first_lines(report))
    parts += _list_findings(report.findings, width, verbose=verbose)
    parts.append(line(words.counts_line(report)))
    for text in (*words.scope_lines(report), *words.omission_lines(report)):
        # Long paths must not push the verdict off the screen.
        if not verbose:
            text = shorten(text, _MOST_LINES * width)
        parts.append(line(text, "dim"))

    return parts


def style_of_first_lines(report: Report) -> str:
    """Return the style of `words.first_lines`."""
    not_finite = words.one_sided_lines(report) + words.not_finite_lines(report)
    return "bold red" if not_finite else "bold yellow"


def _list_findings(findings: Iterable[Finding], width: int, *, verbose: bool) -> Iterator[Part]:
    """Yield one line per finding, the most severe first."""
    rows = _collect_rows(findings)
    most = len(rows) if verbose else _MOST_FINDINGS
    cells_of_rows = list(map(_Row.list_cells, rows[:most]))
    widths = list(map(_measure, zip(*cells_of_rows, strict=True)))
    for row, cells in zip(rows, cells_of_rows, strict=False):
        yield _draw_row(row.finding, cells, widths, width)
    if len(rows) > most:
        yield line(f"... and {len(rows) - most} more findings; -v lists all", "dim", _INDENT)


def _draw_row(finding: Finding, cells: Sequence[str], widths: Sequence[int], width: int) -> Line:
    """Return one line in columns, with as many words of the cause as fit. widths: of the columns."""
    code, *facts = map(str.ljust, cells, widths)
    text = "  ".join(["", *facts, one_line(str(finding.cause)[:_MOST_CAUSE])])
    room = width - _INDENT - len(code)
    return Line((Span(code, SEVERITY_STYLES[finding.severity]), Span(_cut(text, room))), _INDENT)


def _collect_rows(findings: Iterable[Finding]) -> list[_Row]:
    """Return the rows of all findings, the failing and the most severe first."""
    rows: dict[tuple[object, ...], _Row] = {}
    for finding in findings:
        row = _Row(finding)
        rows.setdefault((row.importance, finding.code, finding.certainty), row).add(finding)

    # Sorting is stable, so that findings of one severity keep the order of the diagnosis.
    return sorted(rows.values(), key=attrgetter("importance"))


def _measure(column: Sequence[str]) -> int:
    """Return the characters of the longest cell."""
    return len(max(column, key=len))


def _cut(text: str, room: int) -> str:
    """Return the first words of a text that fit into `room` characters. Three dots mark a cut."""
    if len(text) <= room:
        return text
    beginning, _, _ = text[: max(0, room - len("..."))].rpartition(" ")
    return f"{beginning.rstrip(' .,:;')}..."
