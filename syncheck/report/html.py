"""A report as one self-contained HTML file, which loads nothing.

Verdict, findings and tables are plain HTML. The script of the page adds charts (Apache ECharts, embedded only if there
is something to draw), further steps and rows, sorting and filters.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib import resources
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.series import by_run, shown_steps
from syncheck.records import Counts
from syncheck.report import finding_text, tables, words
from syncheck.report.page_data import (
    bin_counts,
    bin_titles,
    bins_in_use,
    encode,
    find_histograms,
    make_curves,
    make_data,
)
from syncheck.report.selections import SEVERITIES, join_runs, join_shown_steps, list_codes, write_first
from syncheck.text import make_unique_name, one_line, ranks_as_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import Finding, Group, Report

    Steps = Mapping[str, Sequence[Group]]

# Rows of a table without JavaScript.
MOST_ROWS = 200
# Steps of all runs with a row of counts; beyond it only the steps with findings.
_MOST_STEPS = 500
# Tensors of a finding with a link.
_MOST_LINKS = 8
# Tensors of two models with the files that hold their largest difference.
_MOST_PLACES = 10
_DOT = " \u00b7 "
_COUNTS = ("identical", "equal", "close", "different", "not_compared")


class _FindingOfRun(NamedTuple):
    """A finding, and the group that has it."""

    finding: Finding
    group: Group

    @property
    def rank(self) -> tuple[int, ...]:
        """A sort key, the lowest for the most important finding."""
        return _rank(self.finding)


class _Definition(NamedTuple):
    """A label with a text."""

    label: str
    text: str
    is_copyable: bool = False


def render(report: Report, version: str, about: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page. about: labels and texts on how it was made. All texts from files are escaped."""
    runs = by_run(report.groups)
    numbers = dict(zip(runs, count(1), strict=False))
    properties = {"syncheck": version, **dict(about)}
    body = [
        *_head(report, runs, properties.get("written", "")),
        *_findings(runs, numbers),
        *_steps(report, runs),
        *_drift(report),
    ]
    # The run that matters most is open, the others are folded.
    opened_run = min(runs, key=lambda run: _importance(runs[run]), default="")
    for run, groups in runs.items():
        body += _run(groups, numbers[run], is_open=run == opened_run)

    if report.unreadable:
        rows = [(file.path, file.reason) for file in report.unreadable]
        body += ['<h2 id="unreadable">Unreadable files</h2>', _table(("file", "reason"), rows)]

    body += _paragraphs(words.omission_lines(report), "note")
    about_definitions = [_Definition(label, text) for label, text in properties.items() if text]
    body += ['<h2 id="about">About this report</h2>', _definitions(about_definitions)]
    title = ", ".join([f"syncheck: {words.VERDICTS[report.verdict].lower()}", *list(runs)[:1]])
    data = make_data(report, runs)
    encoded = "" if data is None else encode(data)
    return _page(_escape(title), body, encoded)


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
        f"<h1>{_escape(words.verdict_line(report))}</h1>",
        *_paragraphs(words.first_lines(report)),
        _origin(runs, groups, written),
    ]
    if len(groups) <= 1:
        lines += _paragraphs([words.counts_line(report)])
    elif len(runs) == 1:
        # A sum over steps would count each tensor several times.
        last = groups[-1]
        lines += _paragraphs([f"{words.step_text(last)}: {words.counts_text(last.counts)}"])
    if report.verdict == "in_sync" and not any(group.findings for group in groups):
        compared = max((group.counts.compared for group in groups), default=0)
        lines += _paragraphs([f"No difference was found in {compared} compared tensors."])

    return [
        *lines,
        "</header>",
        *_paragraphs([closure.sentence for closure in report.closures], "closure"),
        *_paragraphs(words.fixed_lines(report.groups)),
    ]


def _paragraphs(texts: Iterable[str], css_class: str = "") -> list[str]:
    """Return texts as paragraphs of a class."""
    start = f'<p class="{css_class}">' if css_class else "<p>"
    return [f"{start}{_escape(text)}</p>" for text in texts]


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
    line = _DOT.join(text for text in texts if text)
    return f'<p class="where">{escape(line)}</p>' if line else ""


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
    title = _escape(finding_text.finding_title(finding))
    origin = []
    if is_one_of_many_runs:
        origin.append(group.run)
    if group.step is not None:
        origin.append(words.step_text(group))

    note = f'<p class="note">{_escape(", ".join(origin))}</p>' if origin else ""
    rows = [_Definition(label, text, label == "fix") for label, text in finding_text.finding_rows(finding)]
    rows.append(_Definition("more", finding_text.more_text(finding)))
    return (
        f'<article class="finding {finding.severity}" id="{anchor}"><h2><a href="#{anchor}">{title}</a></h2>'
        f"{note}{_definitions(rows, _tensor_links(finding, number))}</article>"
    )


def _tensor_links(finding: Finding, number: int) -> str:
    """Return the definition of the tensors of a finding. number: of the run."""
    if not finding.tensors:
        return ""

    def link(name: str) -> str:
        return f'<a href="#tensor{number}={escape(_quote(name))}">{_breakable(name)}</a>'

    links = write_first(finding.tensors, _MOST_LINKS, link)
    return f"<dt>tensors</dt><dd>{', '.join(links)}</dd>"


def _definitions(rows: Iterable[_Definition], more: str = "") -> str:
    """Return labels with texts. more: further definitions in HTML."""
    lines = []
    for row in rows:
        attribute = " class=copy" if row.is_copyable else ""
        lines.append(f"<dt>{_escape(row.label)}</dt><dd{attribute}>{_linked(one_line(row.text))}</dd>")
    return f"<dl>{''.join(lines)}{more}</dl>"


def _linked(text: str) -> str:
    """Return an escaped text, as a link if it is an address of the documentation."""
    escaped = escape(text)
    return f'<a href="{escaped}">{escaped}</a>' if text.startswith(words.SITE) else escaped


def _steps(report: Report, runs: Steps) -> list[str]:
    """Return the counts of each step; of too many steps, only steps with news."""
    groups = join_runs(runs)
    if len(groups) < 2 or report.command != "compare":
        return []
    if len(groups) > _MOST_STEPS:
        groups = join_shown_steps(runs)

    kinds = tables.list_kinds(groups)
    totals = sum((group.counts for group in groups), Counts())
    statuses = [name for name in _COUNTS if getattr(totals, name)]
    rows = [_step_row(group, statuses, kinds) for group in groups]
    # Long titles wrap at spaces only.
    titles = [title.replace("_", " ") for title in ("ranks", *statuses, *kinds)]
    counted = titles[: len(statuses) + 1]
    table = _table(["run", "step", "verdict", "findings", *titles], rows, numbers=("step", *counted))
    return [_open_part("steps", "Steps"), f'<div class="steps">{table}</div></details>']


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


def _open_part(name: str, title: str, *, is_open: bool = True, kind: str = "h2") -> str:
    return f'<details id="{name}"{" open" * is_open}><summary><{kind}>{title}</{kind}></summary>'


def _drift(report: Report) -> list[str]:
    if not report.drift:
        return []

    heading = _open_part("drift", "Drift of BatchNorm's running statistics")
    if not any(point.max_abs for point in report.drift):
        return [heading, "<p>No measured difference between the ranks' running statistics at any step.</p></details>"]

    columns = ("run", "step", "largest drift of a running statistic", "tensor")
    table = _table(columns, tables.drift_rows(report), numbers=("step", columns[2]))
    return [heading, table, "</details>"]


def _run(groups: Sequence[Group], number: int, *, is_open: bool) -> list[str]:
    """Return the part of a run: its charts, and the tables of its last step. number: of the run, from 1."""
    group = groups[-1]
    title = f'{_escape(words.group_title(group))}: <span class="{group.verdict}">{words.VERDICTS[group.verdict]}</span>'
    return [
        _open_part(f"run{number}", title, is_open=is_open).replace("<details", '<details class="run"'),
        *_paragraphs(words.note_lines(group), "note"),
        '<div class="charts"></div>',
        *_tensor_table(group),
        *_histograms(group),
        *_history(group),
        "<h3>Files</h3>",
        _file_table(group),
        "</details>",
    ]


def _file_table(group: Group) -> str:
    columns = ("file", "model" if group.is_pair else "rank", "format", "tensors", "bytes")
    rows = []
    for replica in group.replicas:
        row = (
            replica.path,
            replica.label or str(replica.rank),
            replica.format,
            str(replica.tensors),
            words.bytes_text(replica.bytes),
        )
        rows.append(row)

    return _table(columns, rows, numbers=("rank", "tensors", "bytes"))


def _history(group: Group) -> list[str]:
    curves = make_curves(group)
    if not curves:
        return []

    rows = []
    # All curves have a point for each compared step.
    for points in zip(*curves.values(), strict=False):
        step, _ = points[0]
        cells = [tables.difference_text(difference) for _, difference in points]
        rows.append((str(step), *cells))

    table = _table(("step", *curves), rows, ("step", *curves))
    return _fold("Max abs difference of each finding at each step", table)


def _fold(title: str, content: str) -> list[str]:
    return [f"<details><summary>{title}</summary>\n{content}</details>"]


def _histograms(group: Group) -> list[str]:
    """Return the data of the histograms, worst tensor first."""
    diffs = tables.tensors_to_list(group)
    histograms = find_histograms(diffs)
    if not histograms:
        return []

    bins = bins_in_use(histograms.values())
    rows = []
    note = ""
    for diff in diffs:
        histogram = histograms.get(diff.name)
        if histogram is None:
            continue
        differing, max_abs, *_ = tables.difference_cells(diff)
        counts = [str(elements) for elements in bin_counts(histogram, bins)]
        rows.append((diff.name, differing, max_abs, *counts))
        if histogram.elements < diff.numel:
            note = '<p class="note">Large tensors are sampled in evenly spaced parts.</p>'

    columns = ("tensor", "differing", "max abs", *bin_titles(bins))
    table = _table(columns, rows, columns[2:])
    return _fold("Number of elements by absolute difference", f"{note}{table}")


def _tensor_table(group: Group) -> list[str]:
    """Return the table of the tensors of a group, worst first; empty if there are none."""
    diffs = tables.tensors_to_list(group)
    if not diffs:
        return []

    rows = [tables.cells(diff, group) for diff in diffs[:MOST_ROWS]]
    parts = [
        "<h3>Tensors that are not identical</h3>",
        '<div class="tensors">',
        _table(tables.columns(group), rows, numbers=tables.NUMBERS),
    ]
    if len(diffs) > MOST_ROWS:
        more = len(diffs) - MOST_ROWS
        parts.append(f'<p class="note unscripted">... and {more} more; enable JavaScript to see them.</p>')

    parts += _paragraphs(tables.place_lines(diffs[:_MOST_PLACES], group), "note")
    return [*parts, "</div>"]


def _quote(name: str) -> str:
    from urllib.parse import quote

    return quote(one_line(name), safe="")


def _escape(value: str) -> str:
    """Return a text on one line, without HTML markup."""
    return escape(one_line(value))


def _breakable(name: str) -> str:
    """Return an escaped name that is wrapped after a dot or a slash."""
    return _escape(name).replace(".", ".<wbr>").replace("/", "/<wbr>")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return a table of plain texts, the first column in monospace. numbers: columns aligned to the right."""
    # page.js copies the classes of the header cells to added rows.
    classes = ["number" if column in numbers else "" for column in columns]
    classes[0] = "name"
    head = ""
    for css_class, column in zip(classes, columns, strict=True):
        head += f'<th scope="col" class="{css_class}">{_escape(column)}</th>'

    body = "\n".join(f"<tr>{_row(row, classes)}</tr>" for row in rows)
    # A region that scrolls needs the focus of the keyboard.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="table: {_escape(columns[0])}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _row(row: Sequence[str], classes: Sequence[str]) -> str:
    cells = []
    for css_class, cell in zip(classes, row, strict=True):
        content = _breakable(cell) if css_class == "name" else _escape(cell)
        cells.append(f'<td class="{css_class}">{content}</td>')
    return "".join(cells)
