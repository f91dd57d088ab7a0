"""A report as one self-contained HTML file, which loads nothing.

Verdict, findings and tables are plain HTML. The script of the page adds charts (Apache ECharts, embedded only if there
is something to draw), further steps and rows, sorting and filters.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.series import by_run, shown_steps
from syncheck.records import Counts
from syncheck.report import elements, finding_text, page_tables, tables, words
from syncheck.report.elements import Definition, escape_line, paragraphs
from syncheck.report.page_data import compares_drift, encode, make_data
from syncheck.report.selections import SEVERITIES, join_runs, join_shown_steps, list_codes, write_first
from syncheck.report.undecided import undecided_reason
from syncheck.text import make_unique_name, one_line, ranks_as_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import Finding, Group, Report

    Steps = Mapping[str, Sequence[Group]]

# Steps of all runs with a row of counts; beyond it only the steps with findings.
_MOST_STEPS = 500
# Tensors of a finding with a link.
_MOST_LINKS = 8
_DOT = " \u00b7 "


class _FindingOfRun(NamedTuple):
    """A finding, and the group that has it."""

    finding: Finding
    group: Group

    @property
    def rank(self) -> tuple[int, ...]:
        """A sort key, the lowest for the most important finding."""
        return _rank(self.finding)


def render(report: Report, version: str, about: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page. about: labels and texts on how it was made. All texts from files are escaped."""
    runs = by_run(report.groups)
    numbers = dict(zip(runs, count(1), strict=False))
    properties = {"syncheck": version, **dict(about)}
    body = [
        *_head(report, runs, properties.get("written", "")),
        *_findings(runs, numbers),
        *_steps(report, runs),
        *_drift(report, runs),
    ]
    # The run that matters most is open, the others are folded.
    opened_run = min(runs, key=lambda run: _importance(runs[run]), default="")
    for run, groups in runs.items():
        body += _run(groups, numbers[run], is_open=run == opened_run)

    if report.unreadable:
        rows = [(file.path, file.reason) for file in report.unreadable]
        body += ['<h2 id="unreadable">Unreadable files</h2>', elements.table(("file", "reason"), rows)]

    body += paragraphs([*words.scope_lines(report), *words.omission_lines(report)], "note")
    about_definitions = [Definition(label, escape_line(text)) for label, text in properties.items() if text]
    body += ['<h2 id="about">About this report</h2>', elements.definitions(about_definitions)]
    title = ", ".join([f"syncheck: {words.VERDICTS[report.verdict].lower()}", *list(runs)[:1]])
    data = make_data(report, runs)
    encoded = "" if data is None else encode(data)
    return _page(escape_line(title), body, encoded)


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _page(title: str, body: Sequence[str], data: str) -> str:
    """Return the page with its scripts. data: for charts, may be empty."""
    scripts = [_read("page.js")]
    # The script of the page needs ECharts from its first line on.
    if data:
        scripts.insert(0, _read("echarts.js"))
        body = [*body, f'<script type="application/gzip" id="data">{data}</script>']

    sources = []
    script_elements = []
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
        script_elements.append(f"<script>{script}</script>")

    # The policy blocks all loading, and all scripts but these, even if a name in a checkpoint escaped the escaping.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {' '.join(sources)}"
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f"<title>{title}</title>",
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>\n{_read('page.css')}</style>",
        "</head>",
        "<body>",
        *body,
        *script_elements,
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(lines)


def _head(report: Report, runs: Steps, written: str) -> list[str]:
    groups = join_runs(runs)
    lines = [
        f'<header class="{report.verdict}">',
        *_verdict(report),
        *paragraphs(words.first_lines(report)),
        _origin(runs, groups, written),
    ]
    if len(groups) <= 1:
        lines += paragraphs([words.counts_line(report)])
    elif len(runs) == 1:
        # A sum over steps would count each tensor several times.
        last = groups[-1]
        lines += paragraphs([f"{words.step_text(last)}: {words.counts_text(last.counts)}"])
    if report.verdict == "in_sync" and not any(group.findings for group in groups):
        lines += paragraphs(_compared(groups))

    return [
        *lines,
        "</header>",
        *paragraphs([closure.sentence for closure in report.closures], "closure"),
        *paragraphs(words.fixed_lines(report.groups)),
    ]


def _verdict(report: Report) -> list[str]:
    """Return the verdict as the heading. The reason of an undecided verdict is a paragraph below."""
    if report.verdict != "undecided":
        return [f"<h1>{escape_line(words.verdict_line(report))}</h1>"]

    reason = str(undecided_reason(report))
    return [f"<h1>{words.VERDICTS[report.verdict]}</h1>", *paragraphs([reason])]


def _compared(groups: Sequence[Group]) -> list[str]:
    """Return how many tensors of each kind the group with most of them has; empty without groups."""
    if not groups:
        return []

    group = max(groups, key=attrgetter("counts.compared"))
    kinds = [f"{counts.compared} {kind}" for kind, counts in group.kinds.items() if counts.compared]
    return [f"No difference was found in {group.counts.compared} compared tensors: {', '.join(kinds)}."]


def _origin(runs: Steps, groups: Sequence[Group], written: str) -> str:
    """Return runs, steps, ranks and time of a report in HTML; empty if nothing is known. groups: of all runs."""
    if not runs:
        return _where([written])

    steps: set[int] = set()
    ranks: set[int] = set()
    for group in groups:
        if group.step is not None:
            steps.add(group.step)
        if not group.is_pair:
            ranks.update(group.ranks)

    steps_of_runs = ""
    if len(steps) > 1:
        steps_of_runs = f"{len(steps)} steps, {min(steps)} to {max(steps)}"
    elif steps:
        steps_of_runs = f"step {min(steps)}"

    return _where(
        [
            one_line(groups[-1].run) if len(runs) == 1 else f"{len(runs)} runs",
            steps_of_runs,
            ranks_as_ranges(sorted(ranks)) if ranks else "",
            written,
        ]
    )


def _where(texts: Iterable[str]) -> str:
    """Return the texts that are not empty on one line in HTML; empty if all are."""
    line = _DOT.join(filter(None, texts))
    return f'<p class="where">{elements.break_paths(line)}</p>' if line else ""


def _importance(groups: Sequence[Group]) -> tuple[int, ...]:
    """Return a sort key: runs with errors first, then runs with warnings, then runs in sync."""
    # The keys of findings begin with 0 or 1.
    importance: tuple[int, ...] = (2,)
    for group in shown_steps(groups):
        for finding in group.findings:
            importance = min(importance, _rank(finding))
    return importance


def _rank(finding: Finding) -> tuple[int, ...]:
    return not finding.fails, SEVERITIES.index(finding.severity)


def _findings(runs: Steps, numbers: Mapping[str, int]) -> list[str]:
    findings: list[_FindingOfRun] = []
    for groups in runs.values():
        for group in reversed(shown_steps(groups)):
            findings += [_FindingOfRun(finding, group) for finding in group.findings]

    if not findings:
        return []

    findings.sort(key=attrgetter("rank"))
    lines = ['<section id="findings">']
    anchors: set[str] = set()
    for entry in findings:
        # The first anchor has no number, so that links to a finding stay valid when another step has it too.
        anchor = make_unique_name(entry.finding.code, anchors, "-")
        anchors.add(anchor)
        number = numbers[entry.group.run]
        lines.append(_finding(entry, anchor, number, is_one_of_many_runs=len(runs) > 1))

    return [*lines, "</section>"]


def _finding(entry: _FindingOfRun, anchor: str, number: int, *, is_one_of_many_runs: bool) -> str:
    finding, group = entry
    title = escape_line(finding_text.finding_title(finding))
    origin = []
    if is_one_of_many_runs:
        origin.append(group.run)
    if group.step is not None:
        origin.append(words.step_text(group))

    note = f'<p class="note">{escape_line(", ".join(origin))}</p>' if origin else ""
    rows = []
    for label, content in finding_text.finding_rows(finding, group, elements.write):
        rows.append(Definition(label, content, label))
    rows.append(Definition("more", f"<code>syncheck explain {finding.code}</code>"))
    address = finding_text.find_page(finding)
    if address:
        rows.append(Definition("page", elements.link_address(address)))
    if finding.tensors:
        rows.append(Definition("tensors", _tensor_links(finding, number)))
    return (
        f'<article class="finding {finding.severity}" id="{anchor}"><h2><a href="#{anchor}">{title}</a></h2>'
        f"{note}{elements.definitions(rows)}</article>"
    )


def _tensor_links(finding: Finding, number: int) -> str:
    """Return the tensors of a finding as links to their rows. number: of the run."""

    def link(name: str) -> str:
        return f'<a href="#tensor{number}={elements.quote(name)}">{elements.breakable(name)}</a>'

    return ", ".join(write_first(finding.tensors, _MOST_LINKS, link))


def _steps(report: Report, runs: Steps) -> list[str]:
    """Return the counts of each step; of too many steps, only steps with news."""
    groups = join_runs(runs)
    if len(groups) < 2 or report.command != "compare":
        return []
    if len(groups) > _MOST_STEPS:
        groups = join_shown_steps(runs)

    kinds = tables.list_kinds(groups)
    statuses = page_tables.list_statuses(groups)
    rows = [_step_row(group, statuses, kinds) for group in groups]
    # Long titles wrap at spaces only.
    titles = [title.replace("_", " ") for title in ("ranks", *statuses, *kinds)]
    counted = titles[: len(statuses) + 1]
    columns = ["run", "step", "verdict", "findings", *titles]
    # The header has the name of the only run, and its ranks.
    _drop_constant_columns(columns, rows, ("run", "ranks"))
    table = elements.table(columns, rows, numbers=("step", *counted))
    return [elements.open_part("steps", "Steps"), f'<div class="steps">{table}</div></details>']


def _drop_constant_columns(columns: list[str], rows: Sequence[list[str]], titles: Iterable[str]) -> None:
    """Remove the columns with these titles if they have the same cell in all rows."""
    for title in titles:
        position = columns.index(title)
        cells = {row[position] for row in rows}
        if len(cells) > 1:
            continue
        for row in (columns, *rows):
            del row[position]


def _step_row(group: Group, statuses: Sequence[str], kinds: Sequence[str]) -> list[str]:
    cells = [
        group.run,
        tables.number_cell(group.step),
        words.VERDICTS[group.verdict],
        ", ".join(list_codes(group.findings)) or "-",
        str(len(group.replicas)),
    ]
    for name in statuses:
        cells.append(str(getattr(group.counts, name)))

    for kind in kinds:
        cells.append(tables.kind_cell(group.kinds.get(kind, Counts())))

    return cells


def _drift(report: Report, runs: Steps) -> list[str]:
    """Return the drift of each run if BatchNorm's statistics have a finding in one of several runs."""
    if not compares_drift(report, runs):
        return []

    columns = ("run", "step", "largest drift of a running statistic", "tensor")
    table = elements.table(columns, tables.drift_rows(report), numbers=("step", columns[2]))
    return [elements.open_part("drift", "Drift of BatchNorm's running statistics"), table, "</details>"]


def _run(groups: Sequence[Group], number: int, *, is_open: bool) -> list[str]:
    """Return the part of a run: its charts, and the tables of its last step. number: of the run, from 1."""
    group = groups[-1]
    verdict = f'<span class="{group.verdict}">{words.VERDICTS[group.verdict]}</span>'
    title = f"{elements.break_paths(words.group_title(group))}: {verdict}"
    return [
        elements.open_part(f"run{number}", title, is_open=is_open, css_class="run"),
        *page_tables.make_notes(group),
        *page_tables.make_kinds(group),
        '<div class="charts"></div>',
        *page_tables.make_tensors(group),
        *page_tables.make_histograms(group),
        *page_tables.make_history(group),
        *page_tables.make_files(group),
        "</details>",
    ]
