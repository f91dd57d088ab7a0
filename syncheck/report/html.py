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
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.series import by_run, shown_steps
from syncheck.records import Counts
from syncheck.report import finding_text, tables, words
from syncheck.report.page_data import (
    bin_counts,
    bin_label,
    bins_in_use,
    encode,
    find_histograms,
    make_curves,
    make_data,
)
from syncheck.text import one_line, ranks_as_ranges

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
_SEVERITIES = ("error", "warning", "info")


class _FindingOfRun(NamedTuple):
    """A finding, and the group that has it."""

    finding: Finding
    group: Group


class _Definition(NamedTuple):
    """A label with a text."""

    label: str
    text: str
    is_copyable: bool = False


def render(report: Report, version: str, about: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page. about: labels and texts on how it was made. All texts from files are escaped."""
    runs = by_run(report.groups)
    numbers = {run: number for number, run in enumerate(runs, 1)}
    data = make_data(report, runs)
    properties = [("syncheck", version), *about]
    body = [
        *_head(report, runs, dict(properties).get("written", "")),
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
    about_definitions = [_Definition(label, text) for label, text in properties if text]
    body += ['<h2 id="about">About this report</h2>', _definitions(about_definitions)]
    title = f"syncheck: {words.VERDICTS[report.verdict].lower()}"
    if runs:
        title += f", {next(iter(runs))}"
    return _page(_escape(title), body, "" if data is None else encode(data))


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _page(title: str, body: Sequence[str], data: str) -> str:
    scripts = [_read("page.js")]
    if data:
        scripts.insert(0, _read("echarts.js"))
    # The policy blocks all loading, and all scripts but these, even if a name in a checkpoint escaped the escaping.
    sources = []
    for script in scripts:
        digest = hashlib.sha256(script.encode()).digest()
        sources.append(f"'sha256-{base64.b64encode(digest).decode()}'")
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
    ]
    if data:
        lines.append(f'<script type="application/gzip" id="data">{data}</script>')
    lines += [f"<script>{script}</script>" for script in scripts]
    lines += ["</body>", "</html>", ""]
    return "\n".join(lines)


def _head(report: Report, runs: Steps, written: str) -> list[str]:
    groups = _all_groups(runs)
    origin = _origin(runs, groups, written)
    lines = [f'<header class="{report.verdict}">', f"<h1>{_escape(words.verdict_line(report))}</h1>"]
    lines += _paragraphs(words.first_lines(report))
    lines.append(f'<p class="where">{escape(origin)}</p>' if origin else "")
    if len(groups) <= 1:
        lines.append(f"<p>{_escape(words.counts_line(report))}</p>")
    elif len(runs) == 1:
        # A sum over steps would count each tensor several times.
        last = groups[-1]
        lines.append(f"<p>{_escape(f'{words.step_text(last)}: {words.counts_text(last.counts)}')}</p>")
    if report.verdict == "in_sync" and not any(group.findings for group in groups):
        compared = max((group.counts.compared for group in groups), default=0)
        lines.append(f"<p>No difference was found in {compared} compared tensors.</p>")
    lines.append("</header>")
    lines += _paragraphs([closure.sentence for closure in report.closures], "closure")
    lines += _paragraphs(words.fixed_lines(report.groups))
    return lines


def _paragraphs(texts: Iterable[str], css_class: str = "") -> list[str]:
    """Return texts as paragraphs of a class."""
    attribute = f' class="{css_class}"' if css_class else ""
    return [f"<p{attribute}>{_escape(text)}</p>" for text in texts]


def _all_groups(runs: Steps) -> list[Group]:
    groups: list[Group] = []
    for steps in runs.values():
        groups += steps
    return groups


def _origin(runs: Steps, groups: Sequence[Group], written: str) -> str:
    """Return runs, steps, ranks and time of a report. groups: of all runs."""
    parts = []
    if len(runs) == 1:
        parts.append(one_line(groups[-1].run))
    elif runs:
        parts.append(f"{len(runs)} runs")
    steps = list(dict.fromkeys(group.step for group in groups if group.step is not None))
    if len(steps) == 1:
        parts.append(f"step {steps[0]}")
    elif steps:
        parts.append(f"{len(steps)} steps, {min(steps)} to {max(steps)}")
    ranks: set[int] = set()
    for group in groups:
        if not group.is_pair:
            ranks.update(group.ranks)
    if ranks:
        parts.append(ranks_as_ranges(sorted(ranks)))
    if written:
        parts.append(written)
    return _DOT.join(parts)


def _importance(groups: Sequence[Group]) -> tuple[int, ...]:
    """Return a sort key: runs with errors first, then runs with warnings, then runs in sync."""
    importance: tuple[int, ...] = (2,)
    for group in shown_steps(groups):
        importance = min([importance, *map(_rank, group.findings)])
    return importance


def _rank(finding: Finding) -> tuple[int, ...]:
    return not finding.fails, _SEVERITIES.index(finding.severity)


def _findings(runs: Steps, numbers: Mapping[str, int]) -> list[str]:
    findings: list[_FindingOfRun] = []
    for groups in runs.values():
        for group in reversed(shown_steps(groups)):
            findings += [_FindingOfRun(finding, group) for finding in group.findings]
    if not findings:
        return []
    findings.sort(key=lambda entry: _rank(entry.finding))
    lines = ['<section id="findings">']
    anchors: set[str] = set()
    for entry in findings:
        anchor = _choose_anchor(entry.finding.code, anchors)
        anchors.add(anchor)
        number = numbers[entry.group.run]
        lines.append(_finding(entry, anchor, number, is_one_of_many_runs=len(runs) > 1))
    return [*lines, "</section>"]


def _choose_anchor(code: str, anchors: set[str]) -> str:
    """Return an unused anchor: `SYN201`, then `SYN201-2`."""
    # The first anchor has no number, so that links to a finding stay valid when another step has it too.
    anchor, number = code, 1
    while anchor in anchors:
        number += 1
        anchor = f"{code}-{number}"
    return anchor


def _finding(entry: _FindingOfRun, anchor: str, number: int, *, is_one_of_many_runs: bool) -> str:
    finding, group = entry
    title = escape(one_line(finding_text.finding_title(finding)))
    origin = [group.run] if is_one_of_many_runs else []
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
    links = []
    for name in finding.tensors[:_MOST_LINKS]:
        links.append(f'<a href="#tensor{number}={escape(_quote(name))}">{_breakable(name)}</a>')
    if len(finding.tensors) > _MOST_LINKS:
        links.append(f"and {len(finding.tensors) - _MOST_LINKS} more")
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
    groups = _all_groups(runs)
    if len(groups) < 2 or report.command != "compare":
        return []
    if len(groups) > _MOST_STEPS:
        groups = _all_groups({run: shown_steps(steps) for run, steps in runs.items()})
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
        "-" if group.step is None else str(group.step),
        words.VERDICTS[group.verdict],
        ", ".join(finding.code for finding in group.findings) or "-",
        str(len(group.replicas)),
    ]
    cells += [str(getattr(group.counts, name)) for name in statuses]
    cells += [tables.kind_cell(group.kinds.get(kind, Counts())) for kind in kinds]
    return cells


def _open_part(name: str, title: str, *, is_open: bool = True, kind: str = "h2") -> str:
    return f'<details id="{name}"{" open" * is_open}><summary><{kind}>{title}</{kind}></summary>'


def _drift(report: Report) -> list[str]:
    if not report.drift or report.command != "compare":
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
        rank, size = replica.label or str(replica.rank), words.bytes_text(replica.bytes)
        rows.append((replica.path, rank, replica.format, str(replica.tensors), size))
    return _table(columns, rows, numbers=("rank", "tensors", "bytes"))


def _history(group: Group) -> list[str]:
    curves = make_curves(group)
    if not curves:
        return []
    rows = []
    # All curves have a point for each compared step.
    for points in zip(*curves.values(), strict=False):
        step, _ = points[0]
        rows.append((str(step), *(tables.difference_text(difference) for _, difference in points)))
    title = "Max abs difference of each finding at each step"
    return [f"<details><summary>{title}</summary>\n{_table(('step', *curves), rows, ('step', *curves))}</details>"]


def _histograms(group: Group) -> list[str]:
    """Return the data of the histograms, worst tensor first."""
    diffs = tables.tensors_to_list(group)
    histograms = find_histograms(diffs)
    if not histograms:
        return []
    bins = bins_in_use(histograms.values())
    rows = []
    is_sampled = False
    for diff in diffs:
        histogram = histograms.get(diff.name)
        if histogram is not None:
            differing, max_abs, *_ = tables.difference_cells(diff)
            rows.append((diff.name, differing, max_abs, *map(str, bin_counts(histogram, bins))))
            is_sampled = is_sampled or histogram.elements < diff.numel
    note = '<p class="note">Large tensors are sampled in evenly spaced parts.</p>' if is_sampled else ""
    columns = ("tensor", "differing", "max abs", "equal", *map(bin_label, bins), "not finite")
    title = "Number of elements by absolute difference"
    return [f"<details><summary>{title}</summary>\n{note}{_table(columns, rows, columns[2:])}</details>"]


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
