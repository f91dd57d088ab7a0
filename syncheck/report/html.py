"""A report as one HTML file that needs no network and no script.

Charts are drawn by matplotlib (extra `html`); without it the same page comes without them and says so.
"""

from __future__ import annotations

from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

from syncheck.errors import one_line
from syncheck.records import Counts
from syncheck.report import words
from syncheck.series import by_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Finding, Group, Report

# Rows of a group's table; the JSON document has them all.
MOST_ROWS = 500

_STYLE = """
:root { color-scheme: light dark; --edge: #8886; --good: #1a7f37; --bad: #cf222e; --warn: #9a6700; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --bad: #ff7b72; --warn: #d29922; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--edge); padding-bottom: .3rem; }
code, td.name { font-family: ui-monospace, monospace; font-size: .92em; }
h1, h2, h3, p, td.name { overflow-wrap: anywhere; } td { max-width: 30rem; overflow-wrap: break-word; }
td.name { min-width: 10rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .8rem; border-bottom: 1px solid var(--edge); vertical-align: top; }
td.number, th.number { text-align: right; } .wide { overflow-x: auto; }
.in_sync { color: var(--good); } .out_of_sync, .error { color: var(--bad); }
.undecided, .warning { color: var(--warn); }
.closure { font-size: 1.15rem; padding: .8rem 1rem; background: var(--soft); border-left: 4px solid var(--good); }
.finding { padding: .3rem 1rem; margin: 1rem 0; background: var(--soft); border-left: 4px solid currentColor; }
.finding p { color: CanvasText; } .note { opacity: .75; } figure { margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
@media print { body { max-width: none; margin: 0; } .finding, tr { break-inside: avoid; } }
"""


def render(report: Report, version: str) -> str:
    """Return the page. Everything that comes from a file is escaped."""
    runs = by_run(report.groups)
    body = [
        f'<h1 class="{report.verdict}">{_text(words.verdict_line(report))}</h1>',
        f"<p>{_text(words.counts_line(report))}</p>",
        *(f'<p class="closure">{_text(closure.sentence)}</p>' for closure in report.closures),
    ]
    if runs:
        body += ["<h2>Runs</h2>", _matrix([groups[-1] for groups in runs.values()]), *_charts(report)]
    # Of a run with a history, the last step has the findings; the drift chart and table tell of the others.
    for group in (groups[-1] for groups in runs.values()):
        body += _group(group)
    if report.unreadable:
        rows = [(file.path, file.reason) for file in report.unreadable]
        body += ["<h2>Not read</h2>", _table(("file", "why"), rows)]
    alone = [group.name for group in report.groups if group.verdict == "alone"]
    if alone:
        body.append(f'<p class="note">One file each, nothing to compare with: {_text(", ".join(alone))}</p>')
    body.append(f'<p class="note">syncheck {_text(version)}</p>')
    title = _text(f"syncheck: {words.VERDICTS[report.verdict].lower()}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return escape(one_line(text))


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Draw a table of plain texts. numbers: columns aligned to the right; the first column is set as a name."""
    classes = ["name" if i == 0 else "number" if column in numbers else "" for i, column in enumerate(columns)]
    head = "".join(f'<th class="{"number" if c in numbers else ""}">{_text(c)}</th>' for c in columns)
    lines = [
        "<tr>" + "".join(f'<td class="{k}">{_text(cell)}</td>' for k, cell in zip(classes, row, strict=True)) + "</tr>"
        for row in rows
    ]
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n' + "\n".join(lines) + "\n</table></div>"


def _matrix(groups: Sequence[Group]) -> str:
    kinds = list(dict.fromkeys(kind for group in groups for kind in group.kinds))
    rows = [
        (
            group.name,
            str(len(group.replicas)),
            *(words.kind_cell(group.kinds.get(kind, Counts())) for kind in kinds),
            words.VERDICTS[group.verdict],
        )
        for group in groups
    ]
    return _table(("run", "ranks", *kinds, "verdict"), rows, numbers=("ranks",))


def _charts(report: Report) -> list[str]:
    if not report.drift:
        return []
    rows = [
        (point.run, "-" if point.step is None else str(point.step), f"{point.max_abs:.4g}", point.tensor or "-")
        for point in report.drift
    ]
    columns = ("run", "step", "largest drift of a running statistic", "tensor")
    parts = ["<h2>Drift of BatchNorm's running statistics</h2>"]
    if find_spec("matplotlib") is None:
        parts.append('<p class="note">No charts: matplotlib is not installed (pip install "syncheck[html]").</p>')
    else:
        from syncheck.report import charts

        parts += [f"<figure>{drawn}</figure>" for drawn in charts.drift(report)]
    return [*parts, _table(columns, rows, numbers=("step", columns[2]))]


def _group(group: Group) -> list[str]:
    parts = [
        f"<h2>{_text(words.group_title(group))}: {_span(group)}</h2>",
        f'<p class="note">{_text("; ".join(group.notes))}</p>',
        _table(
            ("file", "rank", "format", "tensors", "bytes"),
            [(r.path, str(r.rank), r.format, str(r.tensors), words.bytes_text(r.bytes)) for r in group.replicas],
            numbers=("rank", "tensors", "bytes"),
        ),
        *(_finding(finding) for finding in group.findings),
    ]
    shown = words.listed(group)
    if shown:
        columns = ("tensor", "kind", "ranks", "differing", "max abs", "max rel", "max ulp")
        rows = [(d.name, d.kind, words.clusters_text(d), *words.gap_cells(d)) for d in shown[:MOST_ROWS]]
        parts.append(_table(columns, rows, numbers=columns[4:]))
        if len(shown) > MOST_ROWS:
            parts.append(f'<p class="note">... and {len(shown) - MOST_ROWS} more; the JSON report has all.</p>')
    return parts


def _span(group: Group) -> str:
    return f'<span class="{group.verdict}">{words.VERDICTS[group.verdict]}</span>'


def _finding(finding: Finding) -> str:
    return (
        f'<div class="finding {finding.severity}"><h3>{_text(words.headline(finding))}</h3>'
        f"<p><b>What</b> {_text(finding.evidence)}</p><p><b>Why</b> {_text(finding.cause)}</p>"
        f"<p><b>Fix</b> {_text(finding.fix)}</p></div>"
    )
