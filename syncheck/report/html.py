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
from typing import TYPE_CHECKING

from syncheck.diagnose.series import by_run, shown_steps
from syncheck.records import Counts
from syncheck.report import finding_text, tables, words
from syncheck.report.page_data import bin_counts, bin_label, bins_in_use, encode, make_curves, make_data
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


def render(report: Report, version: str, about: Sequence[tuple[str, str]] = ()) -> str:
    """Return the page. about: labels and texts on how it was made. All texts from files are escaped."""
    runs = by_run(report.groups)
    numbers = {run: i for i, run in enumerate(runs, 1)}
    data = make_data(report, runs)
    made = [("syncheck", version), *about]
    body = [
        *_head(report, runs, dict(made).get("written", "")),
        *_findings(runs, numbers),
        *_steps(report, runs),
        *_drift(report),
    ]
    opened = min(runs, key=lambda run: _importance(runs[run]), default="")
    for run, groups in runs.items():
        body += _run(groups, numbers[run], is_open=run == opened)
    if report.unreadable:
        rows = [(file.path, file.reason) for file in report.unreadable]
        body += ['<h2 id="unreadable">Unreadable files</h2>', _table(("file", "reason"), rows)]
    body += [f'<p class="note">{_escape(line)}</p>' for line in words.omission_lines(report)]
    body += ['<h2 id="about">About this report</h2>', _definitions([(k, v, False) for k, v in made if v])]
    title = f"syncheck: {words.VERDICTS[report.verdict].lower()}" + "".join(f", {run}" for run in list(runs)[:1])
    return _page(_escape(title), body, "" if data is None else encode(data))


@cache
def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _page(title: str, body: Sequence[str], data: str) -> str:
    scripts = [_read("echarts.js")] * bool(data) + [_read("page.js")]
    # The policy blocks all loading, and all scripts but these, even if a name in a checkpoint escaped the escaping.
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {allowed}"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{_read('page.css')}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + (f'\n<script type="application/gzip" id="data">{data}</script>' if data else "")
        + "".join(f"\n<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )


def _head(report: Report, runs: Steps, written: str) -> list[str]:
    groups = [group for steps in runs.values() for group in steps]
    where = [one_line(groups[-1].run)] if len(runs) == 1 else [f"{len(runs)} runs"] * bool(runs)
    steps = list(dict.fromkeys(group.step for group in groups if group.step is not None))
    if steps:
        where.append(f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {min(steps)} to {max(steps)}")
    if ranks := sorted({rank for group in groups for rank in group.ranks if not group.labels}):
        where.append(ranks_as_ranges(ranks))
    where += [written] * bool(written)
    lines = [
        f'<header class="{report.verdict}">',
        f"<h1>{_escape(words.verdict_line(report))}</h1>",
        *(f"<p>{_escape(fact)}</p>" for fact in words.first_lines(report)),
        f'<p class="where">{escape(_DOT.join(where))}</p>' if where else "",
    ]
    if len(groups) <= 1:
        lines.append(f"<p>{_escape(words.counts_line(report))}</p>")
    else:  # a sum over steps would count each tensor several times
        last = groups[-1] if len(runs) == 1 else None
        lines += [f"<p>{_escape(f'{words.step_text(last)}: {words.counts_text(last.counts)}')}</p>"] if last else []
    if report.verdict == "in_sync" and not any(group.findings for group in groups):
        compared = max((group.counts.compared for group in groups), default=0)
        lines.append(f"<p>No difference was found in {compared} compared tensors.</p>")
    lines.append("</header>")
    lines += [f'<p class="closure">{_escape(closure.sentence)}</p>' for closure in report.closures]
    lines += [f"<p>{_escape(line)}</p>" for line in words.fixed_lines(report.groups)]
    return lines


def _importance(groups: Sequence[Group]) -> tuple[int, ...]:
    """Return a sort key: runs with errors first, then runs with warnings, then runs in sync."""
    findings = [finding for group in shown_steps(groups) for finding in group.findings]
    return min(map(_rank, findings), default=(2,))


def _rank(finding: Finding) -> tuple[int, ...]:
    return not finding.fails, ("error", "warning", "info").index(finding.severity)


def _findings(runs: Steps, numbers: Mapping[str, int]) -> list[str]:
    found = [
        (finding, group)
        for groups in runs.values()
        for group in reversed(shown_steps(groups))
        for finding in group.findings
    ]
    if not found:
        return []
    found.sort(key=lambda pair: _rank(pair[0]))
    parts, used = ['<section id="findings">'], set()
    for finding, group in found:
        anchor = next(a for n in range(1, len(found) + 1) if (a := finding.code + f"-{n}" * (n > 1)) not in used)
        used.add(anchor)
        parts.append(_finding(finding, group, anchor, numbers[group.run], one_of_many=len(runs) > 1))
    return [*parts, "</section>"]


def _finding(finding: Finding, group: Group, anchor: str, number: int, *, one_of_many: bool) -> str:
    title = escape(one_line(finding_text.finding_title(finding)))
    where = [group.run] * one_of_many + [words.step_text(group)] * (group.step is not None)
    links = [
        f'<a href="#tensor{number}={escape(_quote(name))}">{_breakable(name)}</a>'
        for name in finding.tensors[:_MOST_LINKS]
    ]
    if (more := len(finding.tensors) - len(links)) > 0:
        links.append(f"and {more} more")
    rows = [(label, text, label == "fix") for label, text in finding_text.finding_rows(finding)]
    rows.append(("more", finding_text.more_text(finding), False))
    tensors = f"<dt>tensors</dt><dd>{', '.join(links)}</dd>" if links else ""
    return (
        f'<article class="finding {finding.severity}" id="{anchor}"><h2><a href="#{anchor}">{title}</a></h2>'
        + (f'<p class="note">{_escape(", ".join(where))}</p>' if where else "")
        + _definitions(rows, tensors)
        + "</article>"
    )


def _definitions(rows: Iterable[tuple[str, str, bool]], more: str = "") -> str:
    """Return labels with texts. The third item of a row: whether its text can be copied."""
    lines = [
        f"<dt>{_escape(label)}</dt><dd{' class=copy' * copy}>{_linked(one_line(text))}</dd>"
        for label, text, copy in rows
    ]
    return f"<dl>{''.join(lines)}{more}</dl>"


def _linked(text: str) -> str:
    """Return an escaped text, as a link if it is an address of the documentation."""
    shown = escape(text)
    return f'<a href="{shown}">{shown}</a>' if text.startswith(words.SITE) else shown


def _steps(report: Report, runs: Steps) -> list[str]:
    groups = [group for steps in runs.values() for group in steps]
    if len(groups) < 2 or report.command != "compare":
        return []
    if len(groups) > _MOST_STEPS:
        groups = [group for steps in runs.values() for group in shown_steps(steps)]
    kinds = list(dict.fromkeys(kind for group in groups for kind in group.kinds))
    used = [name for name in _COUNTS if any(getattr(group.counts, name) for group in groups)]
    rows = [
        (
            group.run,
            "-" if group.step is None else str(group.step),
            words.VERDICTS[group.verdict],
            ", ".join(finding.code for finding in group.findings) or "-",
            str(len(group.replicas)),
            *(str(getattr(group.counts, name)) for name in used),
            *(tables.kind_cell(group.kinds.get(kind, Counts())) for kind in kinds),
        )
        for group in groups
    ]
    titles = ("run", "step", "verdict", "findings", "ranks", *(name.replace("_", " ") for name in used))
    # Long titles wrap at spaces only.
    table = _table((*titles, *(kind.replace("_", " ") for kind in kinds)), rows, numbers=("step", *titles[4:]))
    return [_open_part("steps", "Steps"), f'<div class="steps">{table}</div></details>']


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
        *(f'<p class="note">{_escape(line)}</p>' for line in words.note_lines(group)),
        '<div class="charts"></div>',
        *_tensor_table(group),
        *_histograms(group),
        *_history(group),
        "<h3>Files</h3>",
        _table(
            ("file", "model" if group.labels else "rank", "format", "tensors", "bytes"),
            [
                (r.path, r.label or str(r.rank), r.format, str(r.tensors), words.bytes_text(r.bytes))
                for r in group.replicas
            ],
            numbers=("rank", "tensors", "bytes"),
        ),
        "</details>",
    ]


def _history(group: Group) -> list[str]:
    curves = make_curves(group)
    if not curves:
        return []
    steps = [step for step, _ in next(iter(curves.values()))]
    rows = [
        (str(step), *(tables.difference_text(curve[i][1]) for curve in curves.values())) for i, step in enumerate(steps)
    ]
    title = "Max abs difference of each finding at each step"
    return [f"<details><summary>{title}</summary>\n{_table(('step', *curves), rows, ('step', *curves))}</details>"]


def _histograms(group: Group) -> list[str]:
    """Return the data of the histograms, worst tensor first."""
    found = [(diff, diff.histogram) for diff in tables.tensors_to_list(group) if diff.histogram is not None]
    if not found:
        return []
    bins = bins_in_use([histogram for _, histogram in found])
    rows = [
        (diff.name, *tables.difference_cells(diff)[:2], *map(str, bin_counts(histogram, bins)))
        for diff, histogram in found
    ]
    sampled = any(histogram.elements < diff.numel for diff, histogram in found)
    note = '<p class="note">Large tensors are sampled in evenly spaced parts.</p>' if sampled else ""
    columns = ("tensor", "differing", "max abs", "equal", *map(bin_label, bins), "not finite")
    title = "Number of elements by absolute difference"
    return [f"<details><summary>{title}</summary>\n{note}{_table(columns, rows, columns[2:])}</details>"]


def _tensor_table(group: Group) -> list[str]:
    """Return the table of the tensors of a group, worst first; empty if there are none."""
    diffs = tables.tensors_to_list(group)
    if not diffs:
        return []
    shown = [tables.cells(diff, group) for diff in diffs[:MOST_ROWS]]
    parts = [
        "<h3>Tensors that are not identical</h3>",
        '<div class="tensors">',
        _table(tables.columns(group), shown, numbers=tables.NUMBERS),
    ]
    if len(diffs) > MOST_ROWS:
        more = len(diffs) - MOST_ROWS
        parts.append(f'<p class="note unscripted">... and {more} more; enable JavaScript to see them.</p>')
    parts += [f'<p class="note">{_escape(line)}</p>' for line in tables.place_lines(diffs[:_MOST_PLACES], group)]
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
    classes = ["name" if i == 0 else "number" if column in numbers else "" for i, column in enumerate(columns)]
    # page.js copies the classes of the header cells to added rows.
    head = "".join(f'<th scope="col" class="{k}">{_escape(c)}</th>' for k, c in zip(classes, columns, strict=True))
    lines = [
        "<tr>"
        + "".join(
            f'<td class="{k}">{_breakable(cell) if k == "name" else _escape(cell)}</td>'
            for k, cell in zip(classes, row, strict=True)
        )
        + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    # A region that scrolls needs the focus of the keyboard.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="table: {_escape(columns[0])}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
