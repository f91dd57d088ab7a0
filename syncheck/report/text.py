"""Text output of `syncheck compare`, `report` and `show`, as parts for `plain` and `terminal`."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.series import by_run
from syncheck.messages import Hint
from syncheck.records import Counts
from syncheck.report import finding_text, summary, tables, words
from syncheck.report.long_names import shorten_name, write_names
from syncheck.report.parts import BLANK, Grid, Labels, Line, Part, Span, Sparkline, line, lines
from syncheck.report.selections import (
    find_groups,
    join_runs,
    join_shown_steps,
    split_groups,
    write_first,
)
from syncheck.report.summary import SEVERITY_STYLES, STYLES, WIDTH
from syncheck.report.unbroken import escape_marked, write_unbroken
from syncheck.text import names_text, one_line, ranges_text, shorten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Finding, Group, History, HistoryPoint, Report, TensorDiff

_MOST_REPLICAS = 8
_MOST_TITLES = 8
_MOST_RUNS = 3
_MOST_NOTES = 6
# Columns of the table of tensors that are dropped if they are empty.
_OPTIONAL_TITLES = {*tables.NUMBERS, tables.SCALE, "worst at"}
_MOST_PLACES = 3
# Characters of a reason in the table of tensors, and longer reasons that are stated below the table.
_MOST_REASON, _MOST_REASONS = 80, 3
# A difference this many times the last one is stated beside a curve.
_PEAK = 1.1
_STATISTICS = ("min", "max", "mean", "std")


def draw_comparison(report: Report, limit: int, *, width: int = WIDTH, verbose: bool = False) -> list[Part]:
    """Return the groups that are not in sync with their findings and worst tensors, then the summary.

    limit: tensors listed per group, 0 for all. width: columns of the summary. verbose: whether to print all groups, and
    all columns of differences.
    """
    detailed, other_groups = split_groups(report.groups, verbose=verbose)
    parts = _list_titles(other_groups)
    # The summary has the verdict of the only group.
    several = len(report.groups) > 1
    printed = _Printed()
    for group in detailed:
        parts += _group(group, limit, Hint.ALL_ROWS_OF_COMMAND, printed, has_verdict=several, verbose=verbose)

    parts += [*_suggest_report(report), *_fixed(report)]
    return [*parts, *summary.summarize(report, width=width, verbose=verbose)]


def comparison_body(report: Report, limit: int, all_rows: Hint = Hint.ALL_ROWS) -> list[Part]:
    """Return every group of a report with its verdict, and no summary, for texts with another end.

    limit: tensors listed per group, 0 for all. all_rows: the hint printed if tensors are omitted.
    """
    parts = _paragraph(words.first_lines(report), summary.style_of_first_lines(report))
    printed = _Printed()
    for group in report.groups:
        parts += _group(group, limit, all_rows, printed)

    parts += [*_suggest_report(report), *_fixed(report)]
    return [*parts, *_paragraph([*words.scope_lines(report), *words.omission_lines(report)], "dim")]


def _list_titles(groups: Sequence[Group]) -> list[Part]:
    """Return the titles of groups without details; empty without groups."""
    if not groups:
        return []
    titles: list[Part] = [_title(group) for group in groups[:_MOST_TITLES]]
    if len(groups) > _MOST_TITLES:
        titles.append(line(f"... and {len(groups) - _MOST_TITLES} more groups; -v lists all", "dim"))
    return [*titles, BLANK]


def _suggest_report(report: Report) -> list[Part]:
    """Return a line on runs with several steps, whose first difference `syncheck report` shows."""
    runs = []
    for run, steps in by_run(report.groups).items():
        if len(steps) > 1 and find_groups(steps, "out_of_sync"):
            runs.append(run)

    if not runs:
        return []

    names = ", ".join(write_first(runs, _MOST_RUNS, ending="and {} more"))
    return _paragraph([f"several steps of {names}: syncheck report shows the first step that differs"], "dim")


def _paragraph(texts: Sequence[str], style: str) -> list[Part]:
    """Return escaped lines with a blank line after them; empty without lines."""
    if not texts:
        return []
    return [*lines(texts, style), BLANK]


def draw_overview(report: Report, limit: int, *, width: int = WIDTH, verbose: bool = False) -> list[Part]:
    """Return the tables of runs and of drift, the findings, and gaps closed by SyncBatchNorm, then the summary.

    limit: tensors listed per group, 0 for all. width: columns of the summary. verbose: whether to print all columns of
    differences.
    """
    parts: list[Part] = []
    runs = by_run(report.groups)
    groups = join_shown_steps(runs)
    has_several_steps = len(join_runs(runs)) > len(runs)
    if groups:
        parts += [_matrix(groups), BLANK]
    if report.drift and has_several_steps:
        parts += [_drift(report), BLANK]

    printed = _Printed()
    for group in groups:
        parts += _findings(group, limit, printed, has_verdict=len(groups) > 1, verbose=verbose)

    parts += _notes(groups)
    for closure in report.closures:
        parts += [line(closure.sentence, "bold"), BLANK]

    return [*parts, *_fixed(report), *summary.summarize(report, width=width, verbose=verbose)]


def _findings(group: Group, limit: int, printed: _Printed, *, has_verdict: bool, verbose: bool) -> list[Part]:
    """Return the findings and tensors of a group of an overview; empty without findings."""
    if not group.findings:
        return []
    parts: list[Part] = [_title(group, has_verdict=has_verdict)]
    for finding in group.findings:
        parts += _finding(finding, group, printed, curve=True)
    return parts + _tensors(group, limit, Hint.ALL_ROWS_OF_COMMAND, verbose=verbose)


def _notes(groups: Sequence[Group]) -> list[Part]:
    """Return each note of the groups once."""
    # Most steps of a run have the same notes.
    notes: dict[str, None] = {}
    for group in groups:
        for note in group.notes:
            notes[str(note)] = None
    ending = "... and {} more notes; syncheck compare lists all"
    return _paragraph(write_first(list(notes), _MOST_NOTES, ending=ending), "dim")


def _title(group: Group, *, has_verdict: bool = True) -> Line:
    title = Span(words.group_title(group), "bold")
    verdict = Span(": "), Span(words.VERDICTS[group.verdict], STYLES[group.verdict])
    return Line((title, *verdict) if has_verdict else (title,))


def _group(
    group: Group,
    limit: int,
    all_rows: Hint,
    printed: _Printed,
    *,
    has_verdict: bool = True,
    verbose: bool = False,
) -> list[Part]:
    """Return the findings of a group, then its files, and the tables last."""
    parts: list[Part] = [_title(group, has_verdict=has_verdict)]
    for finding in group.findings:
        parts += _finding(finding, group, printed)

    values = tables.values_text(group.values)
    if values:
        parts += [line(f"values that differ: {values}", "dim", 2), BLANK]

    files = write_first(group.replicas, _MOST_REPLICAS, words.replica_text, ending="... and {} more replicas")
    parts += [*lines(files, indent=2), *lines(words.note_lines(group, write_names), "dim", 2), BLANK]
    # A checkpoint without a replica has no results.
    if group.kinds:
        parts += [_kinds(group), BLANK]

    return parts + _tensors(group, limit, all_rows, verbose=verbose)


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


class _Printed:
    """The advice of one report so far: several findings, and groups, often have the same."""

    _LABELS = ("fix", "next")

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], str] = {}
        """The finding that was printed with a text, by label and text."""

    def shorten(self, label: str, text: str, finding: Finding, group: Group) -> str:
        """Return the text of a row, or a reference if it is advice that an earlier finding has."""
        owner = f"{finding.code} of {one_line(group.name)}"
        earlier = self._owners.setdefault((label, text), owner)
        if label not in self._LABELS or earlier == owner:
            return text
        return f"as for {earlier}, above"


def _finding(finding: Finding, group: Group, printed: _Printed, *, curve: bool = False) -> list[Part]:
    rows: list[tuple[str, str | Sparkline]] = []
    for label, sentence in finding_text.finding_rows(finding, group, write_unbroken):
        rows.append((label, escape_marked(printed.shorten(label, sentence, finding, group))))

    if curve and finding.history is not None:
        rows.insert(2, ("drift", _curve(finding.history)))

    rows.append(("more", finding_text.more_text(finding)))
    return [
        line(finding_text.finding_title(finding), SEVERITY_STYLES[finding.severity], 2),
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


def _tensors(group: Group, limit: int, all_rows: Hint, *, verbose: bool = False) -> list[Part]:
    # SYN104 summarizes shards in one sentence, so only a complete list has them.
    worst = tables.sort_by_kind(tables.tensors_to_list(group, shards=not limit))
    parts: list[Part] = []
    if worst:
        parts.append(_tensor_grid(worst[: limit or None], group, verbose=verbose))
        parts += lines(tables.place_lines(worst[:_MOST_PLACES], group, write_names), indent=2)
        parts += lines(_list_long_reasons(worst[: limit or None]), indent=2)

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


def _shorten_cell(cell: str) -> str:
    """Return a cell of the table of tensors without the middle of a long reason."""
    return shorten(cell, _MOST_REASON)


def _list_long_reasons(diffs: Sequence[TensorDiff]) -> list[str]:
    """Return the first reasons that are too long for the table, each once."""
    cells: dict[str, None] = {}
    for diff in diffs:
        cell, *_ = tables.difference_cells(diff)
        cells[cell] = None

    # The cell of a difference is short.
    long_cells = [cell for cell in cells if len(cell) > _MOST_REASON]
    return long_cells[:_MOST_REASONS]


def _tensor_grid(diffs: Sequence[TensorDiff], group: Group, *, verbose: bool) -> Grid:
    rows = [tables.cells(diff, group) for diff in diffs]
    columns = dict(zip(tables.columns(group), zip(*rows, strict=True), strict=True))
    columns[tables.SCALE] = tuple(tables.scale_cell(diff) for diff in diffs)
    # Numbers of representable values are noise, unless so few separate the replicas that rounding explains them.
    if not verbose and not tables.are_few_ulp(diffs):
        del columns["max ulp"]
        # One number relative to the tensor suffices: its scale is unknown for some kinds.
        if set(columns[tables.SCALE]) != {"-"}:
            del columns["max rel"]

    # Differences are unknown if all tensors are missing or were compared by digest; drop the empty columns then.
    for title in _OPTIONAL_TITLES & columns.keys():
        if set(columns[title]) <= {"", "-"}:
            del columns[title]

    grid = Grid(tuple(columns), right=(*tables.NUMBERS, tables.SCALE), indent=2)
    for name, *cells in zip(*columns.values(), strict=True):
        # A column is as wide as its longest cell.
        grid.add(shorten_name(name), *map(_shorten_cell, cells))

    return grid


def _matrix(groups: Sequence[Group]) -> Grid:
    kinds = tables.list_kinds(groups)
    # With a space the longest heading can wrap on a narrow terminal.
    titles = ["run", *[kind.replace("optimizer_step", "optimizer step") for kind in kinds]]
    # The summary has the verdict of the only group.
    several = len(groups) > 1
    if several:
        titles.append("verdict")
    grid = Grid(tuple(titles))
    for group in groups:
        cells = []
        for kind in kinds:
            counts = group.kinds.get(kind, Counts())
            cells.append(Span(tables.kind_cell(counts), _style_of(counts)))
        if several:
            cells.append(Span(words.VERDICTS[group.verdict], STYLES[group.verdict]))
        grid.add(group.name, *cells)

    return grid


def _drift(report: Report) -> Grid:
    grid = Grid(("run", "step", "largest drift of a running statistic", "tensor"), right=("step",))
    for run, step, drift, tensor in tables.drift_rows(report):
        grid.add(run, step, drift, shorten_name(tensor))
    return grid


def _fixed(report: Report) -> list[Part]:
    """Return the findings of the baseline that no longer occur."""
    return _paragraph(words.fixed_lines(report.groups), "green")


def list_contents(contents: Mapping[str, Any], limit: int = 0) -> list[Part]:
    """Return the output of `syncheck show`.

    contents: the result of `contents.describe`. limit: tensors listed, 0 for all.
    """
    # If all values are finite, the first line states it instead of a column of zeros.
    nonfinite = [row["nonfinite"] for row in contents["tensors"]]
    is_finite = not any(nonfinite)
    statistics = _STATISTICS if is_finite else (*_STATISTICS, "nonfinite")
    grid = Grid(("name", "kind", "dtype", "shape", "bytes", *statistics), right=("bytes", *statistics))
    for row in contents["tensors"][: limit or None]:
        grid.add(
            shorten_name(row["name"]),
            row["kind"],
            row["dtype"],
            row["refused"] or _shape_cell(row["shape"]),
            tables.number_cell(row["bytes"]),
            *[tables.number_cell(row[name], ".4g") for name in statistics],
        )

    header = lines(_contents_header(contents, is_finite=is_finite and 0 in nonfinite))
    return [*header, BLANK, grid, *_count_hidden(contents["tensors"], limit)]


def _count_hidden(rows: Sequence[object], limit: int) -> list[Part]:
    """Return a line with the number of tensors that a limit hides; empty if there are none."""
    if not 0 < limit < len(rows):
        return []
    return [line(f"... and {len(rows) - limit} more; {Hint.ALL_ROWS_OF_COMMAND()}", "dim")]


def _contents_header(contents: Mapping[str, Any], *, is_finite: bool) -> list[str]:
    size = words.bytes_text(contents["bytes"])
    first = f"{contents['path']}: {contents['format']}, {len(contents['tensors'])} tensors, {size}"
    if is_finite:
        first += ", all values finite"

    header = [first]
    if contents["metadata"]:
        entries = [f"{name} {value}" for name, value in contents["metadata"].items() if value is not None]
        header.append(f"metadata: {', '.join(entries)}")
    elif contents["kinds_guessed"]:
        header.append("no metadata: parameters and buffers are distinguished by name")

    values = [f"{name} = {value!r}" for name, value in contents["values"].items()]
    if values:
        header.append(f"values: {names_text(values, 12)}")
    if contents["stubs"]:
        header.append(f"objects of unknown classes, not loaded: {', '.join(contents['stubs'])}")

    return header


def list_shards(contents: Mapping[str, Any], limit: int = 0) -> list[Part]:
    """Return the output of `syncheck show --shards`.

    contents: the result of `sides.list_shards`. limit: tensors listed, 0 for all.
    """
    tensors = words.count_text(len(contents["tensors"]), "tensor")
    files = words.count_text(contents["files"], "file")
    grid = Grid(("tensor", "dtype", "shape", "part", "ranks", "file"))
    for row in contents["tensors"][: limit or None]:
        for box in row["boxes"]:
            grid.add(
                shorten_name(row["name"]),
                row["dtype"],
                _shape_cell(row["shape"]),
                _part_cell(box, row["shape"]),
                ranges_text(box["ranks"]) or "-",
                names_text(box["files"], 1),
            )

    hidden = _count_hidden(contents["tensors"], limit)
    return [line(f"{contents['path']}: {tensors} in {files}"), BLANK, grid, *hidden]


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
