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
    from collections.abc import Mapping, Sequence

    from syncheck.findings import Stored
    from syncheck.records import Group, Histogram, Report, TensorDiff

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
    made = [_make_run(groups, most) for groups in runs.values()]
    points: dict[str, list[list[float]]] = {}
    for point in report.drift:
        if point.step is not None:
            points.setdefault(point.run, []).append([point.step, point.max_abs])
    drift = {one_line(run): of for run, of in points.items() if any(value for _, value in of)}
    if not drift and not any(run["names"] or run["curves"] or run["stored"] for run in made):
        return None
    return {"runs": made, "drift": drift}


def encode(data: dict[str, Any]) -> str:
    """Return the data as base64 of compressed JSON. Its characters have no meaning in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _make_run(groups: Sequence[Group], most: int) -> dict[str, Any]:
    last = groups[-1]
    columns = [] if last.labels else _rank_columns(sorted({rank for group in groups for rank in group.ranks}))
    column_of = {rank: i for i, ranks in enumerate(columns) for rank in ranks}
    texts: dict[str, int] = {}
    sets: dict[tuple[int, ...], int] = {}
    listed = [tables.tensors_to_list(group) for group in groups]
    names = _model_order(groups, [diffs[:most] for diffs in listed])
    position = {name: i for i, name in enumerate(names)}

    def make_row(diff: TensorDiff, group: Group) -> list[Any]:
        name, *cells = tables.cells(diff, group)
        differing = diff.minority or tuple(rank for ranks in diff.clusters for rank in ranks) or group.ranks
        at = (0,) if group.labels else tuple(sorted({column_of[rank] for rank in differing if rank in column_of}))
        indices = [texts.setdefault(one_line(cell), len(texts)) for cell in cells]
        return [position[name], *indices, difference_of(diff), sets.setdefault(at, len(sets))]

    steps = [
        {
            "step": group.step,
            "rows": [make_row(diff, group) for diff in diffs[:most]],
            "omitted": max(0, len(diffs) - most),
            "identical": group.counts.identical,
        }
        for group, diffs in zip(groups, listed, strict=True)
    ]
    return {
        "columns": ["difference"] if last.labels else [ranges_text(ranks) for ranks in columns],
        "axis": "" if last.labels else "rank",
        "names": [one_line(name) for name in names],
        "texts": list(texts),
        "sets": [list(of) for of in sets],
        "steps": steps,
        "curves": make_curves(last),
        "histograms": _make_histograms(listed[-1]),
        "stored": _make_stored(last, listed[-1]),
    }


def _model_order(groups: Sequence[Group], listed: Sequence[Sequence[TensorDiff]]) -> list[str]:
    """Return the names of the listed tensors in the order of the files."""
    wanted = {diff.name for diffs in listed for diff in diffs}
    known = [name for group in reversed(groups) for name in (*group.evidence.names, *(d.name for d in group.tensors))]
    return [name for name in dict.fromkeys(known) if name in wanted]


def difference_of(diff: TensorDiff) -> float:
    """Return the largest difference of a tensor: 0 if it agrees, UNKNOWN if it differs without a number."""
    if diff.status == "not_compared":
        return UNKNOWN if diff.out_of_sync else 0
    if diff.status == "equal":
        return 0
    unknown = len(set(diff.nonfinite.values())) > 1 or diff.max_abs is None or not math.isfinite(diff.max_abs)
    return UNKNOWN if unknown else float(f"{diff.max_abs:.4g}")


def _rank_columns(ranks: Sequence[int]) -> list[Sequence[int]]:
    size = math.ceil(len(ranks) / MOST_COLUMNS)
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


def make_curves(group: Group) -> dict[str, Curve]:
    """Return the largest difference of each finding at every step. group: the last step of a run.

    Findings without a history have no curve.
    """
    with_history = [(finding, finding.history) for finding in group.findings if finding.history is not None]
    return {
        f"{finding.code} on {ranks_text(finding.ranks)}": tuple((point.step, point.max_abs) for point in history.points)
        for finding, history in with_history[:_MOST_CURVES]
    }


def _make_histograms(diffs: Sequence[TensorDiff]) -> dict[str, Any]:
    """Return the labels of the bins, and the counts of each tensor with a histogram, worst first."""
    found = [(diff, diff.histogram) for diff in diffs if diff.histogram is not None]
    bins = bins_in_use([histogram for _, histogram in found])
    return {
        "bins": ["equal", *map(bin_label, bins), "not finite"],
        "rows": [[one_line(diff.name), *bin_counts(histogram, bins)] for diff, histogram in found],
    }


def _make_stored(group: Group, diffs: Sequence[TensorDiff]) -> list[dict[str, Any]]:
    """Return how two models store their tensors: tensors that differ, then the rest, up to a limit."""
    stored = group.evidence.stored
    order = dict.fromkeys(name for name in (*(diff.name for diff in diffs), *stored) if name in stored)
    worst = {diff.name: diff.places for diff in group.tensors}
    rows = []
    for name in order:
        sides = [
            None if side is None else _describe_side(side, worst.get(name, {}).get(i))
            for i, side in enumerate(stored[name])
        ]
        rows.append({"name": one_line(name), "sides": sides})
    return rows


def _describe_side(side: Stored, worst: Any) -> dict[str, Any]:
    """Return a stored tensor as a plane of rows and columns, with the boxes in it and the worst element."""
    across = _choose_dimensions(side)
    index = None if worst is None or not worst.index else [int(worst.index[dim]) for dim in across]
    boxes = [
        [*(start[dim] for dim in across), *(size[dim] for dim in across), one_line(holders)]
        for start, size, holders in side.boxes[:_MOST_BOXES]
        if start is not None and size is not None
    ]
    return {
        "name": one_line(side.name),
        "type": f"{side.dtype} {list(side.shape)}",
        "plane": [side.shape[dim] for dim in across],
        "dims": list(across),
        "boxes": boxes,
        "unknown": sum(start is None for start, _, _ in side.boxes),
        "worst": index,
    }


def _choose_dimensions(side: Stored) -> tuple[int, ...]:
    """Return the dimensions to draw: at most two, those that divide the tensor first."""
    divided = [
        dim
        for dim in range(len(side.shape))
        if len({start[dim] for start, _, _ in side.boxes if start is not None and len(start) > dim}) > 1
    ]
    others = [dim for dim in range(len(side.shape)) if dim not in divided]
    return tuple(sorted((divided + others)[:2]))


def bins_in_use(histograms: Sequence[Histogram]) -> range:
    """Return the bins from the first to the last with an element in any histogram; at least one bin."""
    indices = [i for histogram in histograms for i, count in enumerate(histogram.counts) if count] or [0]
    return range(min(indices), max(indices) + 1)


def bin_counts(histogram: Histogram, bins: range) -> list[int]:
    """Return the elements that are equal, in each bin, and not finite."""
    return [histogram.equal, *(histogram.counts[i] for i in bins), histogram.not_finite]


def bin_label(index: int) -> str:
    """Return the bounds of a bin: '< 1e-12', '1e-3 to 1e-2', '>= 1e6'."""
    if index == 0:
        return f"< 1e{POWERS[0]}"
    return f"1e{POWERS[index - 1]} to 1e{POWERS[index]}" if index < len(POWERS) else f">= 1e{POWERS[-1]}"
