"""Text output of `syncheck compare`, `report`, `show` and `explain`, as parts for `plain` and `terminal`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.series import by_run, shown_steps
from syncheck.messages import Hint
from syncheck.records import Counts
from syncheck.report import finding_text, tables, words
from syncheck.report.parts import BLANK, Grid, Labels, Line, Part, Span, Sparkline, line, lines
from syncheck.text import names_text, one_line, ranges_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Finding, Group, History, Report

STYLES = {"in_sync": "bold green", "out_of_sync": "bold red", "undecided": "bold yellow", "alone": "dim"}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_MOST_REPLICAS = 8
_MOST_NOTES = 6
_MOST_PLACES = 3


def comparison(report: Report, limit: int, all_rows: Hint = Hint.ALL_ROWS) -> list[Part]:
    """Return each group with its findings and worst tensors, then the verdict.

    limit: tensors listed per group, 0 for all. all_rows: the hint printed if tensors are omitted.
    """
    parts = _first_lines(report)
    for group in report.groups:
        parts += _group(group, limit, all_rows)
    runs = [
        run
        for run, groups in by_run(report.groups).items()
        if len(groups) > 1 and any(group.verdict == "out_of_sync" for group in groups)
    ]
    if runs:
        names = f"{', '.join(runs[:3])}{' and others' * (len(runs) > 3)}"
        parts += [line(f"several steps of {names}: syncheck report shows the first step that differs", "dim"), BLANK]
    return parts + _closing(report)


def overview(report: Report, limit: int) -> list[Part]:
    """Return the tables of runs and of drift, the findings, and gaps closed by SyncBatchNorm, then the verdict."""
    parts = _first_lines(report)
    runs = by_run(report.groups)
    shown = [group for groups in runs.values() for group in shown_steps(groups)]
    if runs:
        parts += [_matrix(shown), BLANK]
    if report.drift and any(len(groups) > 1 for groups in runs.values()):
        parts += [_drift(report), BLANK]
    for group in shown:
        if group.findings:
            parts.append(_title(group))
            parts += [part for finding in group.findings for part in _finding(finding, curve=True)]
            parts += _tensors(group, limit, Hint.ALL_ROWS)
    notes = list(dict.fromkeys(str(note) for group in shown for note in group.notes))
    parts += lines(notes[:_MOST_NOTES], "dim")
    if len(notes) > _MOST_NOTES:
        parts.append(line(f"... and {len(notes) - _MOST_NOTES} more notes; syncheck compare lists all", "dim"))
    if notes:
        parts.append(BLANK)
    for closure in report.closures:
        parts += [line(closure.sentence, "bold"), BLANK]
    return parts + _closing(report)


def _first_lines(report: Report) -> list[Part]:
    facts = words.first_lines(report)
    style = "bold red" if words.not_finite_lines(report) else "bold yellow"
    return [*lines(facts, style), BLANK] if facts else []


def _title(group: Group) -> Line:
    return Line(
        (
            Span(words.group_title(group), "bold"),
            Span(": "),
            Span(words.VERDICTS[group.verdict], STYLES[group.verdict]),
        )
    )


def _group(group: Group, limit: int, all_rows: Hint) -> list[Part]:
    files = [words.replica_text(replica) for replica in group.replicas[:_MOST_REPLICAS]]
    if len(group.replicas) > _MOST_REPLICAS:
        files.append(f"... and {len(group.replicas) - _MOST_REPLICAS} more replicas")
    parts = [_title(group), *lines(files, indent=2), *lines(words.note_lines(group), "dim", 2), BLANK]
    if group.verdict == "alone":
        return parts
    if group.kinds:
        parts += [_kinds(group), BLANK]
    for finding in group.findings:
        parts += _finding(finding)
    values = tables.values_text(group.values, group.labels)
    if values:
        parts += [line(f"values that differ: {values}", "dim", 2), BLANK]
    return parts + _tensors(group, limit, all_rows)


def _kinds(group: Group) -> Grid:
    columns = ("tensors", "identical", "equal", "close", "different", "not compared")
    grid = Grid(("kind", *columns), right=columns, indent=2)
    for kind, c in group.kinds.items():
        numbers = (c.tensors, c.identical, c.equal, c.close, c.different, c.not_compared)
        grid.add(kind, *(str(number) for number in numbers), style="red" if c.different else "")
    return grid


def _finding(finding: Finding, *, curve: bool = False) -> list[Part]:
    rows: list[tuple[str, str | Sparkline]] = [
        (label, one_line(of)) for label, of in finding_text.finding_rows(finding)
    ]
    if curve and finding.history is not None:
        rows.insert(2, ("drift", _curve(finding.history)))
    rows.append(("more", f"syncheck explain {finding.code}, or {finding_text.more_text(finding)}"))
    return [
        line(finding_text.finding_title(finding), SEVERITIES[finding.severity], 2),
        Labels(tuple(rows), indent=4),
        BLANK,
    ]


def _curve(history: History) -> Sparkline:
    first, last = history.points[0], history.points[-1]
    most = max(history.points, key=lambda point: point.max_abs or 0)
    # The numbers at both ends would hide a difference that appeared and disappeared.
    has_peak = (most.max_abs or 0) > 1.1 * (last.max_abs or 0)
    peak = f", maximum {tables.difference_text(most.max_abs)} at {most.step}" if has_peak else ""
    return Sparkline(
        tuple(point.max_abs for point in history.points),
        f"step {first.step}: {tables.difference_text(first.max_abs)}",
        f"{last.step}: {tables.difference_text(last.max_abs)}{peak}",
    )


def _tensors(group: Group, limit: int, all_rows: Hint) -> list[Part]:
    worst = tables.tensors_to_list(group, shards=not limit)  # SYN104 summarizes shards in one sentence
    sharded = sum(diff.reason == "sharded" for diff in group.tensors) if limit else 0
    parts: list[Part] = []
    if worst:
        titles = tables.columns(group)
        rows = [tables.cells(diff, group) for diff in worst[: limit or None]]
        # Differences are unknown if all tensors are missing or were compared by digest; drop the empty columns then.
        optional = [i for i, title in enumerate(titles) if title in (*tables.NUMBERS, "worst at")]
        known = any(cells[i] not in ("", "-") for cells in rows for i in optional)
        shown = [i for i in range(len(titles)) if known or i not in optional]
        grid = Grid(tuple(titles[i] for i in shown), right=tables.NUMBERS, indent=2)
        for cells in rows:
            grid.add(*(cells[i] for i in shown))
        parts += [grid, *lines(tables.place_lines(worst[:_MOST_PLACES], group), indent=2)]
    more = [f"{len(worst) - limit} more"] if limit and len(worst) > limit else []
    more += [f"{sharded} sharded"] if sharded else []
    if more:
        parts.append(line(f"... and {' and '.join(more)}; {all_rows()}", "dim", 2))
    return [*parts, BLANK] if parts else []


def _matrix(last: list[Group]) -> Grid:
    kinds = list(dict.fromkeys(kind for group in last for kind in group.kinds))
    # With a space the longest heading can wrap on a narrow terminal.
    grid = Grid(("run", *(kind.replace("optimizer_step", "optimizer step") for kind in kinds), "verdict"))
    for group in last:
        counts_by_kind = [group.kinds.get(kind, Counts()) for kind in kinds]
        cells = [Span(tables.kind_cell(counts), "red" if counts.different else "") for counts in counts_by_kind]
        grid.add(group.name, *cells, Span(words.VERDICTS[group.verdict], STYLES[group.verdict]))
    return grid


def _drift(report: Report) -> Grid:
    grid = Grid(("run", "step", "largest drift of a running statistic", "tensor"), right=("step",))
    for row in tables.drift_rows(report):
        grid.add(*row)
    return grid


def _closing(report: Report) -> list[Part]:
    fixed = lines(words.fixed_lines(report.groups), "green")
    omitted = lines(words.omission_lines(report), "dim")
    return [
        *([*fixed, BLANK] if fixed else []),
        *([*omitted, BLANK] if omitted else []),
        line(words.verdict_line(report), STYLES[report.verdict]),
        line(words.counts_line(report)),
    ]


def list_contents(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show`. contents: the result of `contents.describe`."""
    numbers = ["bytes", "min", "max", "mean", "std"]
    # If all values are finite, the first line states it instead of a column of zeros.
    finite = not any(row["nonfinite"] for row in contents["tensors"])
    numbers += [] if finite else ["nonfinite"]
    grid = Grid(("name", "kind", "dtype", "shape", *numbers), right=tuple(numbers))
    for row in contents["tensors"]:
        statistics = [_number_cell(row[name]) for name in numbers[1:]]
        shape = "x".join(map(str, row["shape"])) or "scalar"
        size = "-" if row["bytes"] is None else str(row["bytes"])
        grid.add(row["name"], row["kind"], row["dtype"], row["refused"] or shape, size, *statistics)
    size = words.bytes_text(contents["bytes"])
    header = [f"{contents['path']}: {contents['format']}, {len(contents['tensors'])} tensors, {size}"]
    if finite and any(row["nonfinite"] == 0 for row in contents["tensors"]):
        header[0] += ", all values finite"
    if contents["metadata"]:
        header.append("metadata: " + ", ".join(f"{k} {v}" for k, v in contents["metadata"].items() if v is not None))
    elif contents["kinds_guessed"]:
        header.append("no metadata: parameters and buffers are distinguished by name")
    values = [f"{name} = {value!r}" for name, value in contents["values"].items()]
    if values:
        header.append(f"values: {names_text(values, 12)}")
    if contents["stubs"]:
        header.append("objects of unknown classes, not loaded: " + ", ".join(contents["stubs"]))
    return [*lines(header), BLANK, grid]


def list_shards(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show --shards`. contents: the result of `sides.list_shards`."""
    count, files = len(contents["tensors"]), contents["files"]
    header = f"{contents['path']}: {count} tensor{'s' * (count != 1)} in {files} file{'s' * (files != 1)}"
    grid = Grid(("tensor", "dtype", "shape", "part", "ranks", "file"))
    for row in contents["tensors"]:
        for box in row["boxes"]:
            whole = box["shape"] == row["shape"]
            part = "whole" if whole else "unknown" if box["start"] is None else _box_text(box["start"], box["shape"])
            more = len(box["files"]) - 1
            file = box["files"][0] + (f" and {more} more" if more else "")
            shape = "x".join(map(str, row["shape"])) or "scalar"
            grid.add(row["name"], row["dtype"], shape, part, ranges_text(box["ranks"]) or "-", file)
    return [line(header), BLANK, grid]


def _box_text(start: Sequence[int], shape: Sequence[int]) -> str:
    return f"[{', '.join(f'{low}:{low + size}' for low, size in zip(start, shape, strict=True))}]"


def _number_cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def list_rules(rules: Sequence[Any]) -> list[Part]:
    """Return the table of all findings, one row per rule module."""
    grid = Grid(("code", "finding", "severity", "summary"))
    for rule in rules:
        grid.add(rule.CODE, Span(rule.SLUG), rule.SEVERITY, rule.__doc__.partition("\n")[0])
    return [grid]


def explain_rule(rule: Any) -> list[Part]:
    """Return the docstring of a rule module, one paragraph per line."""
    parts: list[Part] = [line(f"{rule.CODE} {rule.SLUG} ({rule.SEVERITY})", "bold")]
    for paragraph in textwrap.dedent(rule.__doc__).strip().split("\n\n"):
        parts += [BLANK, line(" ".join(paragraph.split("\n")))]
    return parts
