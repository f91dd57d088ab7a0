"""A report as one self-contained HTML file without network access; its script only sorts, filters and selects.

Charts need matplotlib (extra `html`). Without matplotlib the page has no charts, and a note that says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from syncheck.errors import one_line
from syncheck.records import Counts
from syncheck.report import words
from syncheck.report.chart_data import bin_counts, bin_label, bins_in_use, make_curves, make_heatmap
from syncheck.series import by_run, shown_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

# Rows visible without JavaScript.
MOST_ROWS = 500
# Rows of all tables of a page together, about 100 bytes each.
MOST_DATA = 100_000
# Tensors of two models with the files that hold their largest difference.
_MOST_PLACES = 10
# Runs with their own charts, which take a third of a second and 50 kB each; runs out of sync come first.
_MOST_CHARTS = 10
_HEATMAP_CAPTION = (
    "Max abs difference of each tensor on the ranks outside the majority. Without a majority, all disagreeing ranks "
    "are marked. A tensor that is missing, has another shape, is not finite on some ranks, or was compared by digest "
    "has no numeric difference and a separate color."
)
_HISTOGRAM_CAPTION = (
    "Share of the tensor's elements by absolute difference from the majority. Without a majority, the difference is "
    "measured between the two ranks that are farthest apart."
)
_SAMPLED_CAPTION = " Large tensors are sampled in evenly spaced parts."


def render(report: Report, version: str) -> str:
    """Return the page. All texts from files are escaped."""
    runs = by_run(report.groups)
    charts = find_spec("matplotlib") is not None
    body = [
        f'<h1 class="{report.verdict}">{_escape(words.verdict_line(report))}</h1>',
        f"<p>{_escape(words.counts_line(report))}</p>",
        *(f'<p class="closure">{_escape(closure.sentence)}</p>' for closure in report.closures),
        *(f"<p>{_escape(line)}</p>" for line in words.fixed_lines(report.groups)),
    ]
    if runs and report.command == "compare":
        body += [
            "<h2>Runs</h2>",
            _runs_table([group for groups in runs.values() for group in shown_steps(groups)]),
            *_drift(report, charts=charts),
        ]
    if report.command == "compare" and (report.drift or report.verdict == "out_of_sync") and not charts:
        body.append('<p class="note">No charts: matplotlib is not installed (pip install "syncheck[html]").</p>')
    # If a finding has a history, only the last step has charts; the drift chart and table cover the other steps.
    runs_with_charts = set(_most_important(runs)) if charts else set()
    for run, groups in runs.items():
        shown = shown_steps(groups)
        for group in reversed(shown):
            most = MOST_DATA // len(runs) // len(shown)
            body += _group(group, charts=run in runs_with_charts and group is shown[-1], most_data=most)
    if report.unreadable:
        rows = [(file.path, file.reason) for file in report.unreadable]
        body += ["<h2>Unreadable files</h2>", _table(("file", "reason"), rows)]
    body += [f'<p class="note">{_escape(line)}</p>' for line in words.omission_lines(report)]
    body.append(f'<p class="note">syncheck {_escape(version)}</p>')
    return _page(_escape(f"syncheck: {words.VERDICTS[report.verdict].lower()}"), body)


def _page(title: str, body: Sequence[str]) -> str:
    script = resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    # The policy blocks all loading, and all scripts but page.js, even if a name in a checkpoint escaped the escaping.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _most_important(runs: Mapping[str, Sequence[Group]]) -> list[str]:
    return sorted(runs, key=lambda run: runs[run][-1].verdict != "out_of_sync")[:_MOST_CHARTS]


def _runs_table(groups: Sequence[Group]) -> str:
    kinds = list(dict.fromkeys(kind for group in groups for kind in group.kinds))
    rows = [
        (
            group.name,
            words.VERDICTS[group.verdict],
            ", ".join(finding.code for finding in group.findings) or "-",
            str(len(group.replicas)),
            *(words.kind_cell(group.kinds.get(kind, Counts())) for kind in kinds),
        )
        for group in groups
    ]
    # Long titles wrap at spaces only.
    titles = (kind.replace("_", " ") for kind in kinds)
    drawn = _table(("run", "verdict", "findings", "ranks", *titles), rows, numbers=("ranks",))
    return f'<div class="runs">{drawn}</div>'


def _drift(report: Report, *, charts: bool) -> list[str]:
    if not report.drift:
        return []
    heading = "<h2>Drift of BatchNorm's running statistics</h2>"
    if not any(point.max_abs for point in report.drift):
        return [heading, "<p>No measured difference between the ranks' running statistics at any step.</p>"]
    columns = ("run", "step", "largest drift of a running statistic", "tensor")
    parts = [heading]
    if charts:
        from syncheck.report.charts import draw_drift

        parts += [f"<figure>{chart}</figure>" for chart in draw_drift(report)]
    return [*parts, _table(columns, words.drift_rows(report), numbers=("step", columns[2]))]


def _group(group: Group, *, charts: bool, most_data: int) -> list[str]:
    """Return the part of one step of a run. charts: whether to draw its charts."""
    return [
        f"<h2>{_escape(words.group_title(group))}: {_verdict(group)}</h2>",
        f'<p class="note">{_escape("; ".join(words.note_lines(group)))}</p>',
        _table(
            ("file", "model" if group.labels else "rank", "format", "tensors", "bytes"),
            [
                (r.path, r.label or str(r.rank), r.format, str(r.tensors), words.bytes_text(r.bytes))
                for r in group.replicas
            ],
            numbers=("rank", "tensors", "bytes"),
        ),
        *(_finding(finding) for finding in group.findings),
        *_history(group, charts=charts),
        *(_heatmap(group) if charts and not group.labels else []),
        *_histograms(group, charts=charts),
        *_tensor_table(group, most_data),
    ]


def _verdict(group: Group) -> str:
    return f'<span class="{group.verdict}">{words.VERDICTS[group.verdict]}</span>'


def _finding(finding: Finding) -> str:
    rows = (f"<p><b>{label.capitalize()}</b> {_escape(of)}</p>" for label, of in words.finding_rows(finding))
    title = _escape(words.finding_title(finding))
    return f'<div class="finding {finding.severity}"><h3>{title}</h3>{"".join(rows)}</div>'


def _history(group: Group, *, charts: bool) -> list[str]:
    curves = make_curves(group)
    if not curves:
        return []
    parts = ["<h3>Max abs difference of each finding over the steps</h3>"]
    if charts:
        from syncheck.report.charts import draw_curves

        parts.append(f"<figure>{draw_curves(curves)}</figure>")
    steps = [step for step, _ in next(iter(curves.values()))]
    rows = [
        (str(step), *("-" if curve[i][1] is None else f"{curve[i][1]:.4g}" for curve in curves.values()))
        for i, step in enumerate(steps)
    ]
    drawn = _table(("step", *curves), rows, numbers=tuple(curves))
    return [*parts, f"<details><summary>Show the data</summary>\n{drawn}</details>"]


def _heatmap(group: Group) -> list[str]:
    heatmap = make_heatmap(group)
    if heatmap is None:
        return []
    from syncheck.report.charts import draw_heatmap

    caption = _HEATMAP_CAPTION
    if heatmap.rows_omitted:
        caption += f" {heatmap.rows_omitted} rows with smaller differences are omitted."
    return [
        "<h3>Where the ranks differ</h3>",
        f"<figure>{draw_heatmap(heatmap)}<figcaption>{_escape(caption)}</figcaption></figure>",
    ]


def _histograms(group: Group, *, charts: bool) -> list[str]:
    """Return the part on tensors with a histogram, worst first; empty without histograms.

    charts: draw all histograms into one chart, of which the page's script shows the selected one.
    """
    pairs = [(diff, diff.histogram) for diff in words.tensors_to_list(group) if diff.histogram is not None]
    if not pairs:
        return []
    histograms = [histogram for _, histogram in pairs]
    parts = ["<h3>Distribution of differences over elements</h3>", '<div class="histograms">']
    rows, bins = [], bins_in_use(histograms)
    for diff, histogram in pairs:
        differing, absolute, *_ = words.difference_cells(diff)
        rows.append((diff.name, differing, absolute, *map(str, bin_counts(histogram, bins))))
    if charts:
        from syncheck.report.charts import draw_histograms

        sampled = any(histogram.elements < diff.numel for diff, histogram in pairs)
        caption = _HISTOGRAM_CAPTION + (_SAMPLED_CAPTION if sampled else "")
        name, differing, absolute = rows[0][:3]
        # page.js writes the same line for the selected tensor.
        line = f"{name}: differing elements: {differing}; max abs: {absolute}"
        parts.append(f'<p class="selected">{_escape(line)}</p>')
        parts.append(f"<figure>{draw_histograms(histograms)}<figcaption>{_escape(caption)}</figcaption></figure>")
    columns = ("tensor", "differing", "max abs", "equal", *map(bin_label, bins), "not finite")
    data = _table(columns, rows, numbers=columns[2:])
    title = f"Show the data of {len(rows)} tensors" if len(rows) > 1 else "Show the data"
    return [*parts, f"<details><summary>{title}</summary>\n{data}</details>", "</div>"]


def _tensor_table(group: Group, most_data: int) -> list[str]:
    """Return the table of a group's tensors, worst first; empty if there are none."""
    diffs = words.tensors_to_list(group)
    if not diffs:
        return []
    shown, more = diffs[:MOST_ROWS], diffs[MOST_ROWS : MOST_ROWS + most_data]
    parts = ["<h3>Tensors that are not identical</h3>", '<div class="tensors">']
    parts.append(_table(words.columns(group), [words.cells(diff, group) for diff in shown], numbers=words.NUMBERS))
    if more:
        parts.append(f'<script type="application/json">{_rows_json(more, group)}</script>')
        parts.append(
            f'<p class="note unscripted">... and {len(diffs) - MOST_ROWS} more; enable JavaScript to see them.</p>'
        )
    if omitted := len(diffs) - len(shown) - len(more):
        parts.append(f'<p class="note">{omitted} more tensors are not on this page; the JSON report lists all.</p>')
    parts += [f'<p class="note">{_escape(line)}</p>' for line in words.place_lines(diffs[:_MOST_PLACES], group)]
    return [*parts, "</div>"]


def _rows_json(diffs: Sequence[TensorDiff], group: Group) -> str:
    """Return rows with cells as indices into a list of distinct texts, because most cells repeat."""
    texts: dict[str, int] = {}
    rows = [
        [one_line(name), *(texts.setdefault(one_line(cell), len(texts)) for cell in cells)]
        for name, *cells in (words.cells(diff, group) for diff in diffs)
    ]
    return _script_json({"texts": list(texts), "rows": rows})


def _escape(value: str) -> str:
    """Return a text on one line, without HTML markup."""
    return escape(one_line(value))


def _script_json(value: Any) -> str:
    """Return JSON for a script element, without sequences such as `</script>`."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # HTML entities are not decoded inside a script element, so use the escapes of JSON.
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """Return a table of plain texts, the first column in monospace. numbers: columns aligned to the right."""
    classes = ["name" if i == 0 else "number" if column in numbers else "" for i, column in enumerate(columns)]
    # page.js copies the classes of the header cells to added rows.
    head = "".join(f'<th scope="col" class="{k}">{_escape(c)}</th>' for k, c in zip(classes, columns, strict=True))
    lines = [
        "<tr>"
        + "".join(f'<td class="{k}">{_escape(cell)}</td>' for k, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in rows
    ]
    body = "\n".join(lines)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
