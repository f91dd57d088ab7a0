"""Data of the charts of the HTML page: heatmap, differences over steps, histogram bins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.messages import ranks_text
from syncheck.records import DECADES
from syncheck.report.words import rank_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Group, Histogram, TensorDiff

MOST_ROWS = 60
MOST_COLUMNS = 64
_FEWEST_ROWS = 8
# More lines in one chart could not be distinguished.
_MOST_CURVES = 6
# The powers of ten between the bins of a histogram.
POWERS = (*DECADES, DECADES.stop)

Curve = tuple[tuple[int, float | None], ...]
"""Steps with the largest difference: 0.0 if all ranks agree, None if it is unknown."""


@dataclass(frozen=True, slots=True)
class Heatmap:
    """A table of the largest differences by tensor and rank."""

    rows: tuple[str, ...]
    """Names of tensors in natural order; modules with their number of tensors if there are too many tensors."""
    columns: tuple[str, ...]
    """Ranks, or ranges of ranks."""
    cells: tuple[tuple[float, ...], ...]
    """0.0 if the rank agrees with the majority, infinity if it differs without a numeric difference."""
    rows_omitted: int = 0
    """Rows beyond MOST_ROWS, which have smaller differences."""


def make_heatmap(group: Group) -> Heatmap | None:
    """Return the heatmap of a group; None if no tensor differs by more than the sign of a zero.

    The records hold one difference per tensor. It is assigned to each rank outside the majority; without a majority, to
    all ranks that disagree.
    """
    differences = {diff.name: (_difference(diff), diff.minority or _ranks(diff, group)) for diff in group.tensors}
    differences = {name: (value, ranks) for name, (value, ranks) in differences.items() if value > 0}
    if not differences:
        return None
    columns = _rank_columns(sorted(group.ranks))
    column_of_rank = {rank: i for i, ranks in enumerate(columns) for rank in ranks}
    rows = _group_rows(list(differences))
    cells = {label: [0.0] * len(columns) for label in rows}
    for label, names in rows.items():
        row = cells[label]
        for value, ranks in map(differences.__getitem__, names):
            for column in {column_of_rank[rank] for rank in ranks if rank in column_of_rank}:
                row[column] = max(row[column], value)
    largest = set(sorted(cells, key=lambda label: -max(cells[label]))[:MOST_ROWS])
    labels = [label for label in cells if label in largest]
    return Heatmap(
        tuple(labels),
        tuple(rank_ranges(ranks) for ranks in columns),
        tuple(tuple(cells[label]) for label in labels),
        rows_omitted=len(cells) - len(labels),
    )


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers by value: layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.replace(".", " . ").split()]


def distinct_modules(names: Sequence[str]) -> list[str]:
    """Return the module of each name at the first level at which the modules are not all equal."""
    split = [name.split(".")[:-1] or [name] for name in names]
    depth = 1
    while len({tuple(parts[:depth]) for parts in split}) == 1 and any(len(parts) > depth for parts in split):
        depth += 1
    return [".".join(parts[:depth]) for parts in split]


def _difference(diff: TensorDiff) -> float:
    if diff.status == "not_compared":
        return math.inf if diff.out_of_sync else 0.0
    if diff.status == "equal":
        return 0.0
    differs_in_nonfinite = len(set(diff.nonfinite.values())) > 1
    return math.inf if differs_in_nonfinite or diff.max_abs is None else float(diff.max_abs)


def _ranks(diff: TensorDiff, group: Group) -> tuple[int, ...]:
    return tuple(rank for ranks in diff.clusters for rank in ranks) or group.ranks


def _rank_columns(ranks: Sequence[int]) -> list[Sequence[int]]:
    size = math.ceil(len(ranks) / MOST_COLUMNS)
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


def _group_rows(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the tensors of each row: one per row, or the deepest level of modules with few enough rows."""
    ordered = sorted(names, key=natural_key)
    if len(ordered) <= MOST_ROWS:
        return {name: [name] for name in ordered}
    depth = 1
    while len(_group_by_module(ordered, depth + 1)) <= MOST_ROWS:
        depth += 1
    rows = _group_by_module(ordered, depth)
    if len(rows) < _FEWEST_ROWS:
        rows = _split_modules(rows, depth + 1)
    return {inside[0] if len(inside) == 1 else f"{label} ({len(inside)})": inside for label, inside in rows.items()}


def _group_by_module(names: Sequence[str], depth: int) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    return groups


def _split_modules(parents: Mapping[str, Sequence[str]], depth: int) -> dict[str, list[str]]:
    """Split a few large modules into ranges of their children, because one row for 4,096 layers would be useless."""
    children = [list(_group_by_module(names, depth).items()) for names in parents.values()]
    size = math.ceil(sum(map(len, children)) / (MOST_ROWS - len(parents)))
    rows = {}
    for inside in children:
        for i in range(0, len(inside), size):
            part = inside[i : i + size]
            first, last = part[0][0], part[-1][0].rpartition(".")[2]
            label = first if len(part) == 1 else f"{first} to {last}"
            rows[label] = [name for _, names in part for name in names]
    return rows


def make_curves(group: Group) -> dict[str, Curve]:
    """Return the largest difference of each finding at every step. group: the last step of a run.

    Findings without a history have no curve.
    """
    with_history = [(finding, finding.history) for finding in group.findings if finding.history is not None]
    return {
        f"{finding.code} on {ranks_text(finding.ranks)}": tuple((point.step, point.max_abs) for point in history.points)
        for finding, history in with_history[:_MOST_CURVES]
    }


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
