"""Text output of `syncheck compare`, `report`, `show` and `explain`, as parts for `plain` and `terminal`."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.series import by_run
from syncheck.messages import Hint
from syncheck.records import Counts
from syncheck.report import finding_text, tables, words
from syncheck.report.parts import BLANK, Grid, Labels, Line, Part, Span, Sparkline, line, lines
from syncheck.report.selections import find_groups, join_runs, join_shown_steps, write_first
from syncheck.text import names_text, one_line, ranges_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.rule import Rule
    from syncheck.records import Finding, Group, History, HistoryPoint, Report, TensorDiff

STYLES = {"in_sync": "bold green", "out_of_sync": "bold red", "undecided": "bold yellow", "alone": "dim"}
SEVERITIES = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_MOST_REPLICAS = 8
_MOST_RUNS = 3
_MOST_NOTES = 6
# Columns of the table of tensors that are dropped if they are empty.
_OPTIONAL_TITLES = {*tables.NUMBERS, "worst at"}
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
    return [*parts, *_suggest_report(report), *_omissions(report)]


def _suggest_report(report: Report) -> list[Part]:
    """Return a line on runs with several steps, whose first difference `syncheck report` shows."""
    runs = []
    for run, steps in by_run(report.groups).items():
        if len(steps) > 1 and find_groups(steps, "out_of_sync"):
            runs.append(run)

    if not runs:
        return []

    names = ", ".join(runs[:_MOST_RUNS])
    if len(runs) > _MOST_RUNS:
        names += " and others"

    return _paragraph([f"several steps of {names}: syncheck report shows the first step that differs"], "dim")


def _paragraph(texts: Sequence[str], style: str) -> list[Part]:
    """Return escaped lines with a blank line after them; empty without lines."""
    if not texts:
        return []
    return [*lines(texts, style), BLANK]


def overview(report: Report, limit: int) -> list[Part]:
    """Return the tables of runs and of drift, the findings, and gaps closed by SyncBatchNorm, then the verdict."""
    parts = _first_lines(report)
    runs = by_run(report.groups)
    groups = join_shown_steps(runs)
    has_several_steps = len(join_runs(runs)) > len(runs)
    if groups:
        parts += [_matrix(groups), BLANK]
    if report.drift and has_several_steps:
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
    # Most steps of a run have the same notes.
    notes: dict[str, None] = {}
    for group in groups:
        for note in group.notes:
            notes[str(note)] = None
    ending = "... and {} more notes; syncheck compare lists all"
    return _paragraph(write_first(list(notes), _MOST_NOTES, ending=ending), "dim")


def _first_lines(report: Report) -> list[Part]:
    style = "bold red" if words.not_finite_lines(report) else "bold yellow"
    return _paragraph(words.first_lines(report), style)


def _title(group: Group) -> Line:
    return Line(
        (
            Span(words.group_title(group), "bold"),
            Span(": "),
            Span(words.VERDICTS[group.verdict], STYLES[group.verdict]),
        )
    )


def _group(group: Group, limit: int, all_rows: Hint) -> list[Part]:
    files = write_first(group.replicas, _MOST_REPLICAS, words.replica_text, ending="... and {} more replicas")
    notes = words.note_lines(group)
    parts = [_title(group), *lines(files, indent=2), *lines(notes, "dim", 2), BLANK]
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
        grid.add(kind, *numbers, style=_style_of(counts))
    return grid


def _style_of(counts: Counts) -> str:
    return "red" if counts.different else ""


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
    largest = max(history.points, key=_size_of)
    after = f"{last.step}: {tables.difference_text(last.max_abs)}"
    # The numbers at both ends would hide a difference that appeared and disappeared.
    if _size_of(largest) > _PEAK * _size_of(last):
        after += f", maximum {tables.difference_text(largest.max_abs)} at {largest.step}"

    differences = tuple(point.max_abs for point in history.points)
    return Sparkline(differences, f"step {first.step}: {tables.difference_text(first.max_abs)}", after)


def _size_of(point: HistoryPoint) -> float:
    # An unknown difference is never the largest.
    return point.max_abs or 0


def _tensors(group: Group, limit: int, all_rows: Hint) -> list[Part]:
    # SYN104 summarizes shards in one sentence, so only a complete list has them.
    worst = tables.tensors_to_list(group, shards=not limit)
    parts: list[Part] = []
    if worst:
        parts.append(_tensor_grid(worst[: limit or None], group))
        parts += lines(tables.place_lines(worst[:_MOST_PLACES], group), indent=2)

    hidden = []
    if 0 < limit < len(worst):
        hidden.append(f"{len(worst) - limit} more")

    sharded = [diff for diff in group.tensors if diff.reason == "sharded"]
    if limit and sharded:
        hidden.append(f"{len(sharded)} sharded")
    if hidden:
        parts.append(line(f"... and {' and '.join(hidden)}; {all_rows()}", "dim", 2))
    if parts:
        parts.append(BLANK)

    return parts


def _tensor_grid(diffs: Sequence[TensorDiff], group: Group) -> Grid:
    rows = [tables.cells(diff, group) for diff in diffs]
    columns = dict(zip(tables.columns(group), zip(*rows, strict=True), strict=True))
    # Differences are unknown if all tensors are missing or were compared by digest; drop the empty columns then.
    optional_titles = columns.keys() & _OPTIONAL_TITLES
    optional_cells: set[str] = set()
    for title in optional_titles:
        optional_cells.update(columns[title])

    if optional_cells <= {"", "-"}:
        for title in optional_titles:
            del columns[title]

    grid = Grid(tuple(columns), right=tables.NUMBERS, indent=2)
    for cells in zip(*columns.values(), strict=True):
        grid.add(*cells)

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
            cells.append(Span(tables.kind_cell(counts), _style_of(counts)))
        grid.add(group.name, *cells, Span(words.VERDICTS[group.verdict], STYLES[group.verdict]))

    return grid


def _drift(report: Report) -> Grid:
    grid = Grid(("run", "step", "largest drift of a running statistic", "tensor"), right=("step",))
    for row in tables.drift_rows(report):
        grid.add(*row)
    return grid


def _omissions(report: Report) -> list[Part]:
    """Return the findings of the baseline that were fixed, and the paths that were not compared."""
    fixed = words.fixed_lines(report.groups)
    omitted = words.omission_lines(report)
    return [*_paragraph(fixed, "green"), *_paragraph(omitted, "dim")]


def _verdict(report: Report) -> list[Part]:
    return [line(words.verdict_line(report), STYLES[report.verdict]), line(words.counts_line(report))]


def list_contents(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show`. contents: the result of `contents.describe`."""
    # If all values are finite, the first line states it instead of a column of zeros.
    nonfinite = [row["nonfinite"] for row in contents["tensors"]]
    is_finite = not any(nonfinite)
    statistics = _STATISTICS if is_finite else (*_STATISTICS, "nonfinite")
    grid = Grid(("name", "kind", "dtype", "shape", "bytes", *statistics), right=("bytes", *statistics))
    for row in contents["tensors"]:
        grid.add(
            row["name"],
            row["kind"],
            row["dtype"],
            row["refused"] or _shape_cell(row["shape"]),
            tables.number_cell(row["bytes"]),
            *[tables.number_cell(row[name], ".4g") for name in statistics],
        )

    return [*lines(_contents_header(contents, is_finite=is_finite and 0 in nonfinite)), BLANK, grid]


def _contents_header(contents: Mapping[str, Any], *, is_finite: bool) -> list[str]:
    size = words.bytes_text(contents["bytes"])
    first = f"{contents['path']}: {contents['format']}, {len(contents['tensors'])} tensors, {size}"
    if is_finite:
        first += ", all values finite"

    header = [first]
    entries = []
    for name, value in (contents["metadata"] or {}).items():
        if value is not None:
            entries.append(f"{name} {value}")

    if contents["metadata"]:
        header.append(f"metadata: {', '.join(entries)}")
    elif contents["kinds_guessed"]:
        header.append("no metadata: parameters and buffers are distinguished by name")

    values = [f"{name} = {value!r}" for name, value in contents["values"].items()]
    if values:
        header.append(f"values: {names_text(values, 12)}")
    if contents["stubs"]:
        header.append(f"objects of unknown classes, not loaded: {', '.join(contents['stubs'])}")

    return header


def list_shards(contents: Mapping[str, Any]) -> list[Part]:
    """Return the output of `syncheck show --shards`. contents: the result of `sides.list_shards`."""
    tensors = words.count_text(len(contents["tensors"]), "tensor")
    files = words.count_text(contents["files"], "file")
    grid = Grid(("tensor", "dtype", "shape", "part", "ranks", "file"))
    for row in contents["tensors"]:
        for box in row["boxes"]:
            grid.add(
                row["name"],
                row["dtype"],
                _shape_cell(row["shape"]),
                _part_cell(box, row["shape"]),
                ranges_text(box["ranks"]) or "-",
                names_text(box["files"], 1),
            )

    return [line(f"{contents['path']}: {tensors} in {files}"), BLANK, grid]


def _shape_cell(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _part_cell(box: Mapping[str, Any], shape: Sequence[int]) -> str:
    if box["shape"] == shape:
        return "whole"
    if box["start"] is None:
        return "unknown"
    return _box_text(box["start"], box["shape"])


def _box_text(start: Sequence[int], shape: Sequence[int]) -> str:
    ranges = [f"{low}:{low + size}" for low, size in zip(start, shape, strict=True)]
    return f"[{', '.join(ranges)}]"


def list_rules(rules: Sequence[Rule]) -> list[Part]:
    """Return the table of all findings, one row per rule."""
    grid = Grid(("code", "finding", "severity", "summary"))
    for rule in rules:
        summary, _, _ = rule.explanation.partition("\n")
        grid.add(
            rule.code,
            Span(rule.slug),
            rule.severity,
            summary,
        )

    return [grid]


def explain_rule(rule: Rule) -> list[Part]:
    """Return the explanation of a rule, one paragraph per line."""
    parts: list[Part] = [line(f"{rule.code} {rule.slug} ({rule.severity})", "bold")]
    for paragraph in rule.explanation.split("\n\n"):
        parts += [BLANK, line(" ".join(paragraph.split("\n")))]
    return parts
