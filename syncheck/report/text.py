"""Text output of `syncheck compare`, `report`, `show` and `explain`, as parts for `plain` and `terminal`."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.series import by_run, shown_steps
from syncheck.messages import Hint
from syncheck.records import Counts
from syncheck.report import finding_text, tables, words
from syncheck.report.parts import BLANK, Grid, Labels, Line, Part, Span, Sparkline, line, lines
from syncheck.text import names_text, one_line, ranges_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.rule import Rule
    from syncheck.records import Finding, Group, History, Report, TensorDiff

STYLES = {"in_sync": "bold green", "out_of_sync": "bold red", "undecided": "bold yellow", "alone": "dim"}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_MOST_REPLICAS = 8
_MOST_NOTES = 6
_MOST_PLACES = 3
# A difference this many times the last one is stated beside a curve.
_PEAK = 1.1
_STATISTICS = ("min", "max", "mean", "std")


def comparison(report: Report, limit: int, all_rows: Hint = Hint.ALL_ROWS) -> list[Part]:
    """Return each group with its findings and worst tensors, then the verdict.

    limit: tensors listed per group, 0 for all. all_rows: the hint printed if tensors are omitted.
    """
    return [*comparison_body(report, limit, all_rows), *_verdict(report)]


def comparison_body(report: Report, limit: int, all_rows: Hint = Hint.ALL_ROWS) -> list[Part]:
    """Return the parts of `comparison` above the verdict."""
    parts = _first_lines(report)
    for group in report.groups:
        parts += _group(group, limit, all_rows)
    runs = [run for run, groups in by_run(report.groups).items() if _has_desync_at_several_steps(groups)]
    if runs:
        names = f"{', '.join(runs[:3])}{' and others' * (len(runs) > 3)}"
        parts += [line(f"several steps of {names}: syncheck report shows the first step that differs", "dim"), BLANK]
    return parts + _omissions(report)


def _has_desync_at_several_steps(groups: Sequence[Group]) -> bool:
    return len(groups) > 1 and any(group.verdict == "out_of_sync" for group in groups)


def overview(report: Report, limit: int) -> list[Part]:
    """Return the tables of runs and of drift, the findings, and gaps closed by SyncBatchNorm, then the verdict."""
    parts = _first_lines(report)
    runs = by_run(report.groups)
    groups: list[Group] = []
    for steps in runs.values():
        groups += shown_steps(steps)
    if runs:
        parts += [_matrix(groups), BLANK]
    if report.drift and any(len(steps) > 1 for steps in runs.values()):
        parts += [_drift(report), BLANK]
    for group in groups:
        parts += _findings(group, limit)
    parts += _notes(groups)
    for closure in report.closures:
        parts += [line(closure.sentence, "bold"), BLANK]
    return [*parts, *_omissions(report), *_verdict(report)]


def _findings(group: Group, limit: int) -> list[Part]:
    """Return the findings and tensors of a group of an overview; empty without findings."""
    if not group.findings:
        return []
    parts: list[Part] = [_title(group)]
    for finding in group.findings:
        parts += _finding(finding, curve=True)
    return parts + _tensors(group, limit, Hint.ALL_ROWS)


def _notes(groups: Sequence[Group]) -> list[Part]:
    """Return each note of the groups once."""
    notes: list[str] = []
    for group in groups:
        notes += map(str, group.notes)
    notes = list(dict.fromkeys(notes))
    if not notes:
        return []
    parts = lines(notes[:_MOST_NOTES], "dim")
    if len(notes) > _MOST_NOTES:
        parts.append(line(f"... and {len(notes) - _MOST_NOTES} more notes; syncheck compare lists all", "dim"))
    return [*parts, BLANK]


def _first_lines(report: Report) -> list[Part]:
    facts = words.first_lines(report)
    if not facts:
        return []
    style = "bold red" if words.not_finite_lines(report) else "bold yellow"
    return [*lines(facts, style), BLANK]


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
    values = tables.values_text(group.values)
    if values:
        parts += [line(f"values that differ: {values}", "dim", 2), BLANK]
    return parts + _tensors(group, limit, all_rows)


def _kinds(group: Group) -> Grid:
    columns = ("tensors", "identical", "equal", "close", "different", "not compared")
    grid = Grid(("kind", *columns), right=columns, indent=2)
    for kind, counts in group.kinds.items():
        # The fields of the counts have the order of the columns.
        numbers = [str(number) for number in astuple(counts)]
        grid.add(kind, *numbers, style="red" if counts.different else "")
    return grid


def _finding(finding: Finding, *, curve: bool = False) -> list[Part]:
    rows: list[tuple[str, str | Sparkline]] = []
    for label, sentence in finding_text.finding_rows(finding):
        rows.append((label, one_line(sentence)))
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
    largest = max(history.points, key=lambda point: point.max_abs or 0)
    after = f"{last.step}: {tables.difference_text(last.max_abs)}"
    # The numbers at both ends would hide a difference that appeared and disappeared.
    if (largest.max_abs or 0) > _PEAK * (last.max_abs or 0):
        after += f", maximum {tables.difference_text(largest.max_abs)} at {largest.step}"
    differences = tuple(point.max_abs for point in history.points)
    return Sparkline(differences, f"step {first.step}: {tables.difference_text(first.max_abs)}", after)


def _tensors(group: Group, limit: int, all_rows: Hint) -> list[Part]:
    # SYN104 summarizes shards in one sentence, so only a complete list has them.
    worst = tables.tensors_to_list(group, shards=not limit)
    parts: list[Part] = []
    if worst:
        parts.append(_tensor_grid(worst[: limit or None], group))
        parts += lines(tables.place_lines(worst[:_MOST_PLACES], group), indent=2)
    more = []
    if limit:
        if len(worst) > limit:
            more.append(f"{len(worst) - limit} more")
        sharded = sum(diff.reason == "sharded" for diff in group.tensors)
        if sharded:
            more.append(f"{sharded} sharded")
    if more:
        parts.append(line(f"... and {' and '.join(more)}; {all_rows()}", "dim", 2))
    return [*parts, BLANK] if parts else []


def _tensor_grid(diffs: Sequence[TensorDiff], group: Group) -> Grid:
    titles = tables.columns(group)
    rows = [tables.cells(diff, group) for diff in diffs]
    # Differences are unknown if all tensors are missing or were compared by digest; drop the empty columns then.
    optional = [column for column, title in enumerate(titles) if title in (*tables.NUMBERS, "worst at")]
    columns = list(range(len(titles)))
    optional_cells: set[str] = set()
    for cells in rows:
        optional_cells.update(cells[column] for column in optional)
    if optional_cells <= {"", "-"}:
        columns = [column for column in columns if column not in optional]
    grid = Grid(tuple(titles[column] for column in columns), right=tables.NUMBERS, indent=2)
    for cells in rows:
        grid.add(*(cells[column] for column in columns))
    return grid


def _matrix(groups: Sequence[Group]) -> Grid:
    kinds = tables.list_kinds(groups)
    # With a space the longest heading can wrap on a narrow terminal.
    titles = [kind.replace("optimizer_step", "optimizer step") for kind in kinds]
    grid = Grid(("run", *titles, "verdict"))
    for group in groups:
        cells = []
        for kind in kinds:
            counts = group.kinds.get(kind, Counts())
            cells.append(Span(tables.kind_cell(counts), "red" if counts.different else ""))
        grid.add(group.name, *cells, Span(words.VERDICTS[group.verdict], STYLES[group.verdict]))
    return grid


def _drift(report: Report) -> Grid:
    grid = Grid(("run", "step", "largest drift of a running statistic", "tensor"), right=("step",))
    for row in tables.drift_rows(report):
        grid.add(*row)
    return grid


def _omissions(report: Report) -> list[Part]:
    """Return the findings of the baseline that were fixed, and the paths that were not compared."""
    parts: list[Part] = []
    fixed = words.fixed_lines(report.groups)
    if fixed:
        parts += [*lines(fixed, "green"), BLANK]
    omitted = words.omission_lines(report)
    if omitted:
        parts += [*lines(omitted, "dim"), BLANK]
    return parts


def _verdict(report: Report) -> list[Part]:
    return [line(words.verdict_line(report), STYLES[report.verdict]), line(words.counts_line(report))]


def list_contents(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show`. contents: the result of `contents.describe`."""
    # If all values are finite, the first line states it instead of a column of zeros.
    is_finite = not any(row["nonfinite"] for row in contents["tensors"])
    statistics = _STATISTICS if is_finite else (*_STATISTICS, "nonfinite")
    grid = Grid(("name", "kind", "dtype", "shape", "bytes", *statistics), right=("bytes", *statistics))
    for row in contents["tensors"]:
        shape = row["refused"] or _shape_cell(row["shape"])
        size = "-" if row["bytes"] is None else str(row["bytes"])
        numbers = [_number_cell(row[name]) for name in statistics]
        grid.add(row["name"], row["kind"], row["dtype"], shape, size, *numbers)
    return [*lines(_contents_header(contents, is_finite=is_finite)), BLANK, grid]


def _contents_header(contents: Mapping[str, Any], *, is_finite: bool) -> list[str]:
    size = words.bytes_text(contents["bytes"])
    first = f"{contents['path']}: {contents['format']}, {len(contents['tensors'])} tensors, {size}"
    if is_finite and any(row["nonfinite"] == 0 for row in contents["tensors"]):
        first += ", all values finite"
    header = [first]
    if contents["metadata"]:
        entries = [f"{name} {value}" for name, value in contents["metadata"].items() if value is not None]
        header.append("metadata: " + ", ".join(entries))
    elif contents["kinds_guessed"]:
        header.append("no metadata: parameters and buffers are distinguished by name")
    values = [f"{name} = {value!r}" for name, value in contents["values"].items()]
    if values:
        header.append(f"values: {names_text(values, 12)}")
    if contents["stubs"]:
        header.append("objects of unknown classes, not loaded: " + ", ".join(contents["stubs"]))
    return header


def list_shards(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show --shards`. contents: the result of `sides.list_shards`."""
    count, files = len(contents["tensors"]), contents["files"]
    header = f"{contents['path']}: {count} tensor{'s' * (count != 1)} in {files} file{'s' * (files != 1)}"
    grid = Grid(("tensor", "dtype", "shape", "part", "ranks", "file"))
    for row in contents["tensors"]:
        shape = _shape_cell(row["shape"])
        for box in row["boxes"]:
            file = box["files"][0]
            if len(box["files"]) > 1:
                file += f" and {len(box['files']) - 1} more"
            ranks = ranges_text(box["ranks"]) or "-"
            grid.add(row["name"], row["dtype"], shape, _part_cell(box, row["shape"]), ranks, file)
    return [line(header), BLANK, grid]


def _shape_cell(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _part_cell(box: Mapping[str, Any], shape: Sequence[int]) -> str:
    if box["shape"] == shape:
        return "whole"
    if box["start"] is None:
        return "unknown"
    return _box_text(box["start"], box["shape"])


def _box_text(start: Sequence[int], shape: Sequence[int]) -> str:
    return f"[{', '.join(f'{low}:{low + size}' for low, size in zip(start, shape, strict=True))}]"


def _number_cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def list_rules(rules: Sequence[Rule]) -> list[Part]:
    """Return the table of all findings, one row per rule."""
    grid = Grid(("code", "finding", "severity", "summary"))
    for rule in rules:
        grid.add(rule.code, Span(rule.slug), rule.severity, rule.explanation.partition("\n")[0])
    return [grid]


def explain_rule(rule: Rule) -> list[Part]:
    """Return the explanation of a rule, one paragraph per line."""
    parts: list[Part] = [line(f"{rule.code} {rule.slug} ({rule.severity})", "bold")]
    for paragraph in rule.explanation.split("\n\n"):
        parts += [BLANK, line(" ".join(paragraph.split("\n")))]
    return parts
