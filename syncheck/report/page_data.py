"""The data of a report page: what its script needs to draw charts and tables, as compressed JSON."""

from __future__ import annotations

import base64
import gzip
import json
import math
import sys
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

from syncheck.diagnose.selection import list_names
from syncheck.records import DECADES
from syncheck.report import tables
from syncheck.report.selections import join_runs, list_codes
from syncheck.text import Side, one_line, ranges_text, ranks_text, shorten

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from syncheck.findings import Stored
    from syncheck.records import Group, Histogram, Place, Report, TensorDiff

# Rows of all tables of a page together; compressed, each takes about 10 bytes.
MOST_ROWS = 100_000
# Columns of a map of differences; more ranks share columns.
MOST_COLUMNS = 64
# More lines in one chart could not be distinguished.
_MOST_CURVES = 6
# With fewer steps, the sentences of a finding have all the points of its curve.
_LEAST_POINTS = 3
# Characters of the title of a column.
_MOST_TITLE = 40
# Findings on the running statistics of BatchNorm, whose drift has a chart.
_BATCHNORM = ("SYN201", "SYN202", "SYN203", "SYN204", "SYN205")
# Boxes in the map of one tensor's shards.
_MOST_BOXES = 1024
# The powers of ten between the bins of a histogram.
POWERS = (*DECADES, DECADES.stop)

Curve = tuple[tuple[int, float | None], ...]
"""Steps with the largest difference: 0.0 if all ranks agree, None if it is unknown."""
# The value of a difference without a number in the page's data, because JSON has no infinity.
UNKNOWN = -1


def make_data(report: Report, runs: Mapping[str, Sequence[Group]]) -> dict[str, Any] | None:
    """Return the data of the page, None if there is nothing to draw. runs: the groups of each run by step."""
    most = MOST_ROWS // max(1, len(join_runs(runs)))
    drift = _make_drift(report) if compares_drift(report, runs) else {}
    drawings = list(drift)
    data_of_runs = []
    for groups in runs.values():
        data = _make_run(groups, most)
        data_of_runs.append(data)
        drawings += [*data["names"], *data["curves"], *data["stored"]]

    return {"runs": data_of_runs, "drift": drift} if drawings else None


def compares_drift(report: Report, runs: Mapping[str, Sequence[Group]]) -> bool:
    """Whether a page has the drift of BatchNorm's statistics: if a finding is about them, in one of several runs.

    The curve of the finding has the same numbers for a single run.
    """
    conditions = (
        len(runs) > 1,
        bool(report.drift),
        not set(_BATCHNORM).isdisjoint(list_codes(report.findings)),
    )
    return all(conditions)


def _make_drift(report: Report) -> dict[str, list[list[float]]]:
    """Return steps with the drift of each run that has any; empty for one run, whose finding has the same curve."""
    points_of_run: dict[str, list[list[float]]] = {}
    largest_of_run: dict[str, float] = {}
    for point in report.drift:
        if point.step is None:
            continue
        run = one_line(point.run)
        points_of_run.setdefault(run, []).append([point.step, point.max_abs])
        largest_of_run[run] = max(point.max_abs, largest_of_run.get(run, 0))

    # A run in sync has nothing to draw.
    for run, largest in largest_of_run.items():
        if not largest:
            del points_of_run[run]

    return points_of_run if len(points_of_run) > 1 else {}


def encode(data: dict[str, Any]) -> str:
    """Return the data as base64 of compressed JSON. Its characters have no meaning in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


class _Index:
    """The number of each different object, in the order of the first occurrence."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        # A page has thousands of rows with the same few texts.
        self.numbers: dict[Any, int] = dict(zip(items, count(), strict=False))

    def __getitem__(self, item: Any) -> int:
        return self.numbers.setdefault(item, len(self.numbers))


class _Columns(NamedTuple):
    """The columns of a map of differences, each for ranks that agree in every listed tensor."""

    titles: list[str]
    axis: str
    """The title of all columns; empty for two replicas or models: each difference is between the two."""
    ranks: list[Sequence[int]]
    """The ranks of each column; empty for two replicas or models, which share one column."""


class _Rows:
    """The rows of all steps of a run, which refer to names, texts and sets of columns by number."""

    def __init__(self, names: Iterable[str], columns: _Columns) -> None:
        self.columns = columns
        self.names = _Index(names)
        self.texts = _Index()
        self.column_sets = _Index()

    def make(self, diff: TensorDiff, group: Group) -> list[float]:
        """Return the row of a tensor: its name, its cells, its difference and its columns."""
        name, *cells = tables.cells(diff, group)
        row: list[float] = [self.names[name]]
        for cell in cells:
            row.append(self.texts[one_line(cell)])
        column_set = _differing_columns(diff, group, self.columns)
        return [*row, difference_of(diff), self.column_sets[column_set]]


def _make_run(groups: Sequence[Group], most: int) -> dict[str, Any]:
    """Return the data of a run. most: rows of each step."""
    diffs_of_steps = [tables.tensors_to_list(group) for group in groups]
    names: set[str] = set()
    for diffs in diffs_of_steps:
        names.update(list_names(diffs[:most]))

    columns = _list_columns(groups, diffs_of_steps)
    rows = _Rows(_model_order(groups, names), columns)
    steps = []
    for group, diffs in zip(groups, diffs_of_steps, strict=True):
        step = {
            "step": group.step,
            "rows": [rows.make(diff, group) for diff in diffs[:most]],
            "omitted": max(0, len(diffs) - most),
            "identical": group.counts.identical,
        }
        steps.append(step)

    last, last_diffs = groups[-1], diffs_of_steps[-1]
    return {
        "columns": columns.titles,
        "axis": columns.axis,
        "names": [one_line(name) for name in rows.names.numbers],
        "texts": list(rows.texts.numbers),
        "sets": list(rows.column_sets.numbers),
        "steps": steps,
        "curves": make_curves(last),
        "histograms": _make_histograms(last_diffs),
        "stored": _make_stored(last, last_diffs),
    }


def _list_columns(groups: Sequence[Group], diffs_of_steps: Iterable[Iterable[TensorDiff]]) -> _Columns:
    """Return the columns of a run: one for each set of ranks that agree; of many sets, several share a column."""
    all_ranks: set[int] = set()
    for group in groups:
        all_ranks.update(group.ranks)

    if groups[-1].is_pair or len(all_ranks) <= 2:
        return _Columns(["difference"], "", [])

    agreeing = _group_agreeing(sorted(all_ranks), diffs_of_steps)
    size = math.ceil(len(agreeing) / MOST_COLUMNS)
    columns = _Columns([], "ranks", [])
    for start in range(0, len(agreeing), size):
        ranks_of_column = sorted(chain.from_iterable(agreeing[start : start + size]))
        columns.titles.append(shorten(ranges_text(ranks_of_column), _MOST_TITLE))
        columns.ranks.append(ranks_of_column)

    return columns


def _group_agreeing(ranks: Sequence[int], diffs_of_steps: Iterable[Iterable[TensorDiff]]) -> list[list[int]]:
    """Return the sets of ranks that agree in every listed tensor of every step, by their first rank."""
    # Thousands of tensors divide the ranks in the same few ways.
    divisions: dict[tuple[tuple[int, ...], ...], None] = {}
    for diffs in diffs_of_steps:
        for diff in diffs:
            divisions[*diff.clusters, diff.minority] = None

    set_of_rank = dict.fromkeys(ranks, 0)
    for division in divisions:
        cluster_of_rank: dict[int, int] = {}
        for number, cluster in enumerate(division):
            cluster_of_rank.update(dict.fromkeys(cluster, number))

        # Each set of ranks is divided by the clusters of this tensor.
        numbers = _Index()
        for rank, previous in set_of_rank.items():
            set_of_rank[rank] = numbers[previous, cluster_of_rank.get(rank)]

    ranks_of_set: dict[int, list[int]] = {}
    for rank, number in set_of_rank.items():
        ranks_of_set.setdefault(number, []).append(rank)

    return list(ranks_of_set.values())


def _differing_columns(diff: TensorDiff, group: Group, columns: _Columns) -> tuple[int, ...]:
    """Return the columns of the ranks outside the majority; without a majority, of all compared ranks."""
    # Two replicas or models share one column.
    if not columns.ranks:
        return (0,)

    compared = set(group.ranks)
    if diff.clusters:
        compared = set().union(*diff.clusters)

    differing = set(diff.minority) or compared
    numbers = []
    for column, ranks in enumerate(columns.ranks):
        if not differing.isdisjoint(ranks):
            numbers.append(column)

    return tuple(numbers)


def _model_order(groups: Sequence[Group], names: Container[str]) -> list[str]:
    """Return names of tensors in the order of the files."""
    order: dict[str, None] = {}
    for group in reversed(groups):
        order.update(dict.fromkeys(group.evidence.names))
        order.update(dict.fromkeys(list_names(group.tensors)))
    return _sort_layers([name for name in order if name in names])


def _sort_layers(names: Iterable[str]) -> list[str]:
    """Return names in their order, except that layers are sorted by number: layer 2 before layer 10.

    Some formats, for example safetensors, store names in the order of their texts.
    """
    # The numbered parts of a module share the position of the first numbered part.
    positions: dict[str, int] = {}
    keys: dict[str, list[tuple[int, int, str]]] = {}
    for position, name in enumerate(names):
        module = ""
        key = []
        for part in name.split("."):
            if part.isdecimal():
                # Compared as texts, because a name may have thousands of digits.
                key.append((positions.setdefault(module, position), len(part), part))
            module += f".{part}"
        keys[name] = [*key, (position, 0, "")]

    return sorted(keys, key=keys.__getitem__)


def difference_of(diff: TensorDiff) -> float:
    """Return the largest difference of a tensor: 0 if it agrees, UNKNOWN if it differs without a number."""
    if diff.status in ("equal", "not_compared") and not diff.out_of_sync:
        return 0

    is_partly_nonfinite = len(set(diff.nonfinite.values())) > 1
    if is_partly_nonfinite or diff.max_abs is None or not math.isfinite(diff.max_abs):
        return UNKNOWN

    # The largest numbers of float64 round to infinity.
    return min(float(f"{diff.max_abs:.4g}"), sys.float_info.max)


def make_curves(group: Group) -> dict[str, Curve]:
    """Return the largest difference of each finding at every step. group: the last step of a run.

    Findings without a history have no curve, and findings with equal curves share one.
    """
    titles_of_curve: dict[Curve, list[str]] = {}
    for finding in group.findings:
        if finding.history is None or len(finding.history.points) < _LEAST_POINTS:
            continue
        title = f"{finding.code} on {ranks_text(finding.ranks)}"
        curve = tuple((point.step, point.max_abs) for point in finding.history.points)
        titles_of_curve.setdefault(curve, []).append(title)

    curves: dict[str, Curve] = {}
    for curve, titles in list(titles_of_curve.items())[:_MOST_CURVES]:
        curves[", ".join(titles)] = curve

    return curves


def _make_histograms(diffs: Sequence[TensorDiff]) -> dict[str, Any]:
    """Return the labels of the bins, and the counts of each tensor with a histogram, worst first."""
    histograms = find_histograms(diffs)
    bins = bins_in_use(histograms.values())
    rows = []
    for name, histogram in histograms.items():
        rows.append([one_line(name), *bin_counts(histogram, bins)])
    return {"bins": bin_titles(bins), "rows": rows}


def _make_stored(group: Group, diffs: Sequence[TensorDiff]) -> list[dict[str, Any]]:
    """Return how two models store their tensors: tensors that differ, then the rest, up to a limit."""
    stored = group.evidence.stored
    places_of_tensor: dict[str, Mapping[int, Place]] = {}
    for diff in group.tensors:
        places_of_tensor[diff.name] = diff.places

    rows = []
    for name in dict.fromkeys([*list_names(diffs), *stored]):
        if name in stored:
            places = places_of_tensor.get(name, {})
            stored_a, stored_b = stored[name]
            sides = [_describe_side(stored_a, places.get(Side.A)), _describe_side(stored_b, places.get(Side.B))]
            rows.append({"name": one_line(name), "sides": sides})

    return rows


def _describe_side(side: Stored | None, place: Place | None) -> dict[str, Any] | None:
    """Return a stored tensor as a plane of rows and columns, with the boxes in it and the worst element.

    place: of the worst element. None for a model without the tensor.
    """
    if side is None:
        return None

    starts = [start for start, _, _ in side.boxes if start is not None]
    dimensions = _choose_dimensions(starts, len(side.shape))
    worst = None
    if place is not None and place.index:
        worst = _project(place.index, dimensions)

    boxes = []
    for start, size, holders in side.boxes[:_MOST_BOXES]:
        if start is not None and size is not None:
            corner, extent = _project(start, dimensions), _project(size, dimensions)
            boxes.append([*corner, *extent, one_line(holders)])

    return {
        "name": one_line(side.name),
        "type": f"{side.dtype} {list(side.shape)}",
        "plane": _project(side.shape, dimensions),
        "dims": dimensions,
        "boxes": boxes,
        "unknown": len(side.boxes) - len(starts),
        "worst": worst,
    }


def _project(sizes: Sequence[int], dimensions: Sequence[int]) -> list[int]:
    return [int(sizes[dimension]) for dimension in dimensions]


def _choose_dimensions(starts: Sequence[Sequence[int]], dimension_count: int) -> list[int]:
    """Return the dimensions to draw: at most two, first the dimensions that divide the tensor.

    starts: the positions of the tensor's boxes.
    """
    divided, undivided = [], []
    for dimension in range(dimension_count):
        positions = {start[dimension] for start in starts if len(start) > dimension}
        if len(positions) > 1:
            divided.append(dimension)
        else:
            undivided.append(dimension)

    return sorted((divided + undivided)[:2])


def find_histograms(diffs: Iterable[TensorDiff]) -> dict[str, Histogram]:
    """Return the histograms by tensor; empty unless a page was requested."""
    return {diff.name: diff.histogram for diff in diffs if diff.histogram is not None}


def bins_in_use(histograms: Iterable[Histogram]) -> range:
    """Return the bins from the first to the last with an element in any histogram; at least one bin."""
    used: set[int] = set()
    for histogram in histograms:
        for index, elements in enumerate(histogram.counts):
            if elements:
                used.add(index)
    return range(min(used, default=0), max(used, default=0) + 1)


def bin_counts(histogram: Histogram, bins: range) -> list[int]:
    """Return the elements that are equal, in each bin, and not finite."""
    return [histogram.equal, *histogram.counts[bins.start : bins.stop], histogram.not_finite]


def bin_titles(bins: range) -> list[str]:
    """Return the titles of `bin_counts`."""
    return ["equal", *[bin_label(index) for index in bins], "not finite"]


def bin_label(index: int) -> str:
    """Return the bounds of a bin: '< 1e-12', '1e-3 to 1e-2', '>= 1e6'."""
    if index == 0:
        return f"< 1e{POWERS[0]}"
    if index == len(POWERS):
        return f">= 1e{POWERS[-1]}"
    return f"1e{POWERS[index - 1]} to 1e{POWERS[index]}"
