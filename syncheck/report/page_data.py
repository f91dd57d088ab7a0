"""The data of a report page: what its script needs to draw charts and tables, as compressed JSON."""

from __future__ import annotations

import base64
import gzip
import json
import math
from typing import TYPE_CHECKING, Any

from syncheck.records import DECADES
from syncheck.report import tables
from syncheck.text import one_line, ranges_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from syncheck.findings import Stored
    from syncheck.records import Group, Histogram, Place, Report, TensorDiff

# Rows of all tables of a page together; compressed, each takes about 10 bytes.
MOST_ROWS = 100_000
# Columns of a map of differences; more ranks share columns.
MOST_COLUMNS = 64
# More lines in one chart could not be distinguished.
_MOST_CURVES = 6
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
    most = MOST_ROWS // max(1, sum(map(len, runs.values())))
    data_of_runs = [_make_run(groups, most) for groups in runs.values()]
    drift = _make_drift(report)
    if not drift and not any(data["names"] or data["curves"] or data["stored"] for data in data_of_runs):
        return None
    return {"runs": data_of_runs, "drift": drift}


def _make_drift(report: Report) -> dict[str, list[list[float]]]:
    """Return steps with the drift of each run that has any."""
    points_of_run: dict[str, list[list[float]]] = {}
    for point in report.drift:
        if point.step is not None:
            points_of_run.setdefault(point.run, []).append([point.step, point.max_abs])
    drift = {}
    for run, points in points_of_run.items():
        if any(max_abs for _, max_abs in points):
            drift[one_line(run)] = points
    return drift


def encode(data: dict[str, Any]) -> str:
    """Return the data as base64 of compressed JSON. Its characters have no meaning in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


class _Index:
    """The number of each different object, in the order of the first occurrence."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __getitem__(self, item: Any) -> int:
        return self.numbers.setdefault(item, len(self.numbers))


def _make_run(groups: Sequence[Group], most: int) -> dict[str, Any]:
    """Return the data of a run. Rows refer to names, texts and sets of columns by number. most: rows of each step."""
    last = groups[-1]
    columns = [] if last.is_pair else _rank_columns(groups)
    diffs_of_steps = [tables.tensors_to_list(group) for group in groups]
    names = _model_order(groups, [diffs[:most] for diffs in diffs_of_steps])
    positions = {name: position for position, name in enumerate(names)}
    texts, sets = _Index(), _Index()
    steps = []
    for group, diffs in zip(groups, diffs_of_steps, strict=True):
        rows = []
        for diff in diffs[:most]:
            name, *cells = tables.cells(diff, group)
            cell_numbers = [texts[one_line(cell)] for cell in cells]
            # A map of two models has one column.
            column_set = (0,) if group.is_pair else _differing_columns(diff, group, columns)
            rows.append([positions[name], *cell_numbers, difference_of(diff), sets[column_set]])
        step = {
            "step": group.step,
            "rows": rows,
            "omitted": max(0, len(diffs) - most),
            "identical": group.counts.identical,
        }
        steps.append(step)
    titles, axis = ["difference"], ""
    if not last.is_pair:
        titles, axis = list(map(ranges_text, columns)), "rank"
    return {
        "columns": titles,
        "axis": axis,
        "names": list(map(one_line, names)),
        "texts": list(texts.numbers),
        "sets": list(map(list, sets.numbers)),
        "steps": steps,
        "curves": make_curves(last),
        "histograms": _make_histograms(diffs_of_steps[-1]),
        "stored": _make_stored(last, diffs_of_steps[-1]),
    }


def _differing_columns(diff: TensorDiff, group: Group, columns: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the columns of the ranks outside the majority; without a majority, of all compared ranks."""
    differing = set(diff.minority)
    if not differing:
        differing.update(*diff.clusters)
    differing = differing or set(group.ranks)
    return tuple(column for column, ranks in enumerate(columns) if not differing.isdisjoint(ranks))


def _model_order(groups: Sequence[Group], listed: Sequence[Sequence[TensorDiff]]) -> list[str]:
    """Return the names of the listed tensors in the order of the files."""
    listed_names: set[str] = set()
    for diffs in listed:
        listed_names.update(diff.name for diff in diffs)
    order: dict[str, None] = {}
    for group in reversed(groups):
        order.update(dict.fromkeys(group.evidence.names))
        order.update(dict.fromkeys(diff.name for diff in group.tensors))
    return [name for name in order if name in listed_names]


def difference_of(diff: TensorDiff) -> float:
    """Return the largest difference of a tensor: 0 if it agrees, UNKNOWN if it differs without a number."""
    if diff.status == "not_compared":
        return UNKNOWN if diff.out_of_sync else 0
    if diff.status == "equal":
        return 0
    is_partly_nonfinite = len(set(diff.nonfinite.values())) > 1
    if is_partly_nonfinite or diff.max_abs is None or not math.isfinite(diff.max_abs):
        return UNKNOWN
    return float(f"{diff.max_abs:.4g}")


def _rank_columns(groups: Sequence[Group]) -> list[Sequence[int]]:
    """Return the ranks of each column of a map of differences."""
    all_ranks: set[int] = set()
    for group in groups:
        all_ranks.update(group.ranks)
    ranks = sorted(all_ranks)
    size = math.ceil(len(ranks) / MOST_COLUMNS)
    return [ranks[start : start + size] for start in range(0, len(ranks), size)]


def make_curves(group: Group) -> dict[str, Curve]:
    """Return the largest difference of each finding at every step. group: the last step of a run.

    Findings without a history have no curve.
    """
    curves: dict[str, Curve] = {}
    with_history = [(finding, finding.history) for finding in group.findings if finding.history is not None]
    for finding, history in with_history[:_MOST_CURVES]:
        points = tuple((point.step, point.max_abs) for point in history.points)
        curves[f"{finding.code} on {ranks_text(finding.ranks)}"] = points
    return curves


def _make_histograms(diffs: Sequence[TensorDiff]) -> dict[str, Any]:
    """Return the labels of the bins, and the counts of each tensor with a histogram, worst first."""
    histograms = find_histograms(diffs)
    bins = bins_in_use(histograms.values())
    rows = [[one_line(name), *bin_counts(histogram, bins)] for name, histogram in histograms.items()]
    return {"bins": ["equal", *map(bin_label, bins), "not finite"], "rows": rows}


def _make_stored(group: Group, diffs: Sequence[TensorDiff]) -> list[dict[str, Any]]:
    """Return how two models store their tensors: tensors that differ, then the rest, up to a limit."""
    stored = group.evidence.stored
    names = dict.fromkeys([*(diff.name for diff in diffs), *stored])
    places_of_tensor = {diff.name: diff.places for diff in group.tensors}
    rows = []
    for name in names:
        if name not in stored:
            continue
        places = places_of_tensor.get(name, {})
        sides: list[dict[str, Any] | None] = []
        for rank, side in enumerate(stored[name]):
            sides.append(None if side is None else _describe_side(side, places.get(rank)))
        rows.append({"name": one_line(name), "sides": sides})
    return rows


def _describe_side(side: Stored, place: Place | None) -> dict[str, Any]:
    """Return a stored tensor as a plane of rows and columns, with the boxes in it and the worst element."""
    dimensions = _choose_dimensions(side)
    worst = None
    if place is not None and place.index:
        worst = [int(place.index[dimension]) for dimension in dimensions]
    boxes = []
    for start, size, holders in side.boxes[:_MOST_BOXES]:
        if start is not None and size is not None:
            corner, extent = _project(start, dimensions), _project(size, dimensions)
            boxes.append([*corner, *extent, one_line(holders)])
    return {
        "name": one_line(side.name),
        "type": f"{side.dtype} {list(side.shape)}",
        "plane": _project(side.shape, dimensions),
        "dims": list(dimensions),
        "boxes": boxes,
        "unknown": sum(start is None for start, _, _ in side.boxes),
        "worst": worst,
    }


def _project(sizes: Sequence[int], dimensions: Sequence[int]) -> list[int]:
    return [sizes[dimension] for dimension in dimensions]


def _choose_dimensions(side: Stored) -> tuple[int, ...]:
    """Return the dimensions to draw: at most two, those that divide the tensor first."""
    divided, undivided = [], []
    starts = [start for start, _, _ in side.boxes if start is not None]
    for dimension in range(len(side.shape)):
        positions = {start[dimension] for start in starts if len(start) > dimension}
        if len(positions) > 1:
            divided.append(dimension)
        else:
            undivided.append(dimension)
    return tuple(sorted((divided + undivided)[:2]))


def find_histograms(diffs: Iterable[TensorDiff]) -> dict[str, Histogram]:
    """Return the histograms by tensor; empty unless a page was requested."""
    return {diff.name: diff.histogram for diff in diffs if diff.histogram is not None}


def bins_in_use(histograms: Iterable[Histogram]) -> range:
    """Return the bins from the first to the last with an element in any histogram; at least one bin."""
    used: set[int] = set()
    for histogram in histograms:
        used.update(index for index, count in enumerate(histogram.counts) if count)
    return range(min(used, default=0), max(used, default=0) + 1)


def bin_counts(histogram: Histogram, bins: range) -> list[int]:
    """Return the elements that are equal, in each bin, and not finite."""
    return [histogram.equal, *histogram.counts[bins.start : bins.stop], histogram.not_finite]


def bin_label(index: int) -> str:
    """Return the bounds of a bin: '< 1e-12', '1e-3 to 1e-2', '>= 1e6'."""
    if index == 0:
        return f"< 1e{POWERS[0]}"
    return f"1e{POWERS[index - 1]} to 1e{POWERS[index]}" if index < len(POWERS) else f">= 1e{POWERS[-1]}"
