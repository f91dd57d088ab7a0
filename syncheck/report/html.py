"""A report as one HTML file that needs no network, and a script only to sort, filter and choose.

Charts are drawn by matplotlib (extra `html`); without it the same page comes without them and says so.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from importlib.util import find_spec
from typing import TYPE_CHECKING

from syncheck.errors import one_line
from syncheck.records import Counts
from syncheck.report import histogram, when, words
from syncheck.report.curves import curves
from syncheck.report.heat import heat
from syncheck.report.markup import data, table, text
from syncheck.series import by_run, shown_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Finding, Group, Report, TensorDiff

COLUMNS = ("tensor", "kind", "ranks", "differing", "max abs", "max rel", "max ulp")

# Rows that a reader without JavaScript sees.
MOST_ROWS = 500
# Rows of all tables of a page together, about 100 bytes each; the JSON document has them all.
MOST_DATA = 100_000


def _page_script() -> str:
    """Return the script that sorts, filters and turns the pages of the tables."""
    return resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")


def _tensor_table(group: Group, most_data: int = MOST_DATA) -> list[str]:
    """Return the parts of the page that list a group's tensors, worst first; none where there are none."""
    listed = words.listed(group)
    if not listed:
        return []
    shown, more = listed[:MOST_ROWS], listed[MOST_ROWS : MOST_ROWS + most_data]
    parts = ["<h3>Tensors that are not identical</h3>", '<div class="tensors">']
    parts.append(table(COLUMNS, [_cells(diff) for diff in shown], numbers=COLUMNS[4:]))
    if more:
        parts.append(f'<script type="application/json">{_data(more)}</script>')
        parts.append(f'<p class="note unscripted">... and {len(listed) - MOST_ROWS} more, which need JavaScript.</p>')
    if len(listed) > len(shown) + len(more):
        left_out = len(listed) - len(shown) - len(more)
        parts.append(f'<p class="note">{left_out} more are not on this page; the JSON report has all.</p>')
    return [*parts, "</div>"]


def _cells(diff: TensorDiff) -> tuple[str, ...]:
    return diff.name, diff.kind, words.clusters_text(diff), *words.gap_cells(diff)


def _data(diffs: Sequence[TensorDiff]) -> str:
    """Write the rows as names and, for the other cells, places in a list of texts: few of those are unlike."""
    texts: dict[str, int] = {}
    rows = [
        [one_line(name), *(texts.setdefault(one_line(cell), len(texts)) for cell in cells)]
        for name, *cells in map(_cells, diffs)
    ]
    return data({"texts": list(texts), "rows": rows})


# Runs with charts of their own, a third of a second and 50 kB each; those out of sync come first.
_MOST_DRAWN = 10


def render(report: Report, version: str) -> str:
    """Return the page. Everything that comes from a file is escaped."""
    runs = by_run(report.groups)
    charts = find_spec("matplotlib") is not None
    body = [
        f'<h1 class="{report.verdict}">{text(words.verdict_line(report))}</h1>',
        f"<p>{text(words.counts_line(report))}</p>",
        *(f'<p class="closure">{text(closure.sentence)}</p>' for closure in report.closures),
        *(f"<p>{text(told)}</p>" for told in words.fixed_lines(report.groups)),
    ]
    if runs:
        body += [
            "<h2>Runs</h2>",
            _matrix([group for groups in runs.values() for group in shown_steps(groups)]),
            *_drift(report, charts=charts),
        ]
    if (report.drift or report.verdict == "out_of_sync") and not charts:
        body.append('<p class="note">No charts: matplotlib is not installed (pip install "syncheck[html]").</p>')
    # Of a run with a history, the last step has the findings; the drift chart and table tell of the others.
    drawn = set(_worth_drawing(runs)) if charts else set()
    for run, groups in runs.items():
        shown = shown_steps(groups)
        for group in reversed(shown):
            most = MOST_DATA // len(runs) // len(shown)
            body += _group(group, charts=run in drawn and group is shown[-1], most_data=most)
    if report.unreadable:
        rows = [(file.path, file.reason) for file in report.unreadable]
        body += ["<h2>Not read</h2>", table(("file", "why"), rows)]
    body += [f'<p class="note">{text(line)}</p>' for line in words.omission_lines(report)]
    body.append(f'<p class="note">syncheck {text(version)}</p>')
    title = text(f"syncheck: {words.VERDICTS[report.verdict].lower()}")
    script = _page_script()
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    # Nothing is loaded, and no script runs but the one that syncheck wrote, whatever a file's names hold.
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


def _worth_drawing(runs: Mapping[str, Sequence[Group]]) -> list[str]:
    return sorted(runs, key=lambda run: runs[run][-1].verdict != "out_of_sync")[:_MOST_DRAWN]


def _matrix(groups: Sequence[Group]) -> str:
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
    # Spaces let long headings fold; a page narrower than the table cuts the verdict last.
    titles = (kind.replace("_", " ") for kind in kinds)
    return (
        f'<div class="runs">{table(("run", "verdict", "findings", "ranks", *titles), rows, numbers=("ranks",))}</div>'
    )


def _drift(report: Report, *, charts: bool) -> list[str]:
    if not report.drift:
        return []
    if not any(point.max_abs for point in report.drift):
        same = "No gap between the ranks' running statistics at any step at which it is known."
        return ["<h2>Drift of BatchNorm's running statistics</h2>", f"<p>{same}</p>"]
    columns = ("run", "step", "largest drift of a running statistic", "tensor")
    parts = ["<h2>Drift of BatchNorm's running statistics</h2>"]
    if charts:
        from syncheck.report.charts import drift

        parts += [f"<figure>{drawn}</figure>" for drawn in drift(report)]
    return [*parts, table(columns, words.drift_rows(report), numbers=("step", columns[2]))]


def _group(group: Group, *, charts: bool, most_data: int) -> list[str]:
    """Draw one step of a run, with the history of its findings. charts: whether to draw those that it has."""
    return [
        f"<h2>{text(words.group_title(group))}: {_span(group)}</h2>",
        f'<p class="note">{text("; ".join(words.notes_of(group)))}</p>',
        table(
            ("file", "rank", "format", "tensors", "bytes"),
            [(r.path, str(r.rank), r.format, str(r.tensors), words.bytes_text(r.bytes)) for r in group.replicas],
            numbers=("rank", "tensors", "bytes"),
        ),
        *(_finding(finding) for finding in group.findings),
        *_history(group, charts=charts),
        *(_heatmap(group) if charts else []),
        *histogram.draw(group, charts=charts),
        *_tensor_table(group, most_data),
    ]


def _history(group: Group, *, charts: bool) -> list[str]:
    lines = curves(group)
    if not lines:
        return []
    parts = ["<h3>Largest gap of each finding's tensors over the steps</h3>"]
    if charts:
        from syncheck.report.charts import over_steps

        parts.append(f"<figure>{over_steps(lines)}</figure>")
    steps = [step for step, _ in next(iter(lines.values()))]
    rows = [
        (str(step), *("-" if line[i][1] is None else f"{line[i][1]:.4g}" for line in lines.values()))
        for i, step in enumerate(steps)
    ]
    drawn = table(("step", *lines), rows, numbers=tuple(lines))
    return [*parts, f"<details><summary>The numbers</summary>\n{drawn}</details>"]


def _heatmap(group: Group) -> list[str]:
    found = heat(group)
    if found is None:
        return []
    from syncheck.report.charts import heatmap

    caption = (
        "Largest gap of each tensor, on the ranks that are outside the majority; where there is no majority, on all "
        "that do not agree. Where no number tells the gap (missing, of another shape, not finite on some ranks, "
        "compared by digest), the cell says so by its colour."
    )
    if found.left_out:
        caption += f" {found.left_out} rows with smaller gaps are left out."
    return [
        "<h3>Where the ranks differ</h3>",
        f"<figure>{heatmap(found)}<figcaption>{text(caption)}</figcaption></figure>",
    ]


def _span(group: Group) -> str:
    return f'<span class="{group.verdict}">{words.VERDICTS[group.verdict]}</span>'


def _finding(finding: Finding) -> str:
    since = f"<p><b>When</b> {text(when.sentence(finding))}</p>" if finding.history is not None else ""
    return (
        f'<div class="finding {finding.severity}"><h3>{text(words.headline(finding))}</h3>'
        f"<p><b>What</b> {text(finding.evidence)}</p>{since}<p><b>Why</b> {text(str(finding.cause))}</p>"
        f"<p><b>Fix</b> {text(str(finding.fix))}</p></div>"
    )
