"""Which tensors are how far apart on which ranks: the numbers of the heatmap, bounded in both directions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.report.words import spans_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Group, TensorDiff

MOST_ROWS = 60
MOST_COLUMNS = 64
_FEWEST_ROWS = 8


@dataclass(frozen=True, slots=True)
class Heat:
    """A table of gaps."""

    rows: tuple[str, ...]
    """Tensors, or modules with the number of their tensors where there are too many, in natural order of names."""
    columns: tuple[str, ...]
    """Ranks, or runs of adjacent ranks."""
    cells: tuple[tuple[float, ...], ...]
    """The largest gap; 0.0 where the rank agrees with the majority, infinity where no number tells how far apart."""
    left_out: int = 0
    """Rows beyond the bound, whose gaps are smaller."""


def heat(group: Group) -> Heat | None:
    """Return the heatmap of a group, None where no tensor is apart by more than the sign of a zero.

    The records have one gap a tensor. It stands for each rank outside the majority, and where there is none for all
    ranks that do not agree.
    """
    gaps = {diff.name: (_gap(diff), diff.minority or _ranks(diff, group)) for diff in group.tensors}
    gaps = {name: (gap, ranks) for name, (gap, ranks) in gaps.items() if gap > 0}
    if not gaps:
        return None
    bins = _bins(sorted(group.ranks))
    place = {rank: i for i, ranks in enumerate(bins) for rank in ranks}
    rows = _rows(list(gaps))
    cells = {label: [0.0] * len(bins) for label in rows}
    for label, names in rows.items():
        row = cells[label]
        for gap, ranks in map(gaps.__getitem__, names):
            for column in {place[rank] for rank in ranks if rank in place}:
                row[column] = max(row[column], gap)
    kept = set(sorted(cells, key=lambda label: -max(cells[label]))[:MOST_ROWS])
    labels = [label for label in cells if label in kept]
    return Heat(
        tuple(labels),
        tuple(spans_text(ranks) for ranks in bins),
        tuple(tuple(cells[label]) for label in labels),
        left_out=len(cells) - len(labels),
    )


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer2 and layer10 parts as people do: layers.2 before layers.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.replace(".", " . ").split()]


def modules(names: Sequence[str]) -> list[str]:
    """Return the module of each name at the first level at which they are not all in the same."""
    split = [name.split(".")[:-1] or [name] for name in names]
    depth = 1
    while len({tuple(parts[:depth]) for parts in split}) == 1 and any(len(parts) > depth for parts in split):
        depth += 1
    return [".".join(parts[:depth]) for parts in split]


def _gap(diff: TensorDiff) -> float:
    if diff.status == "not_compared":
        return math.inf if diff.out_of_sync else 0.0
    if diff.status == "equal":
        return 0.0
    unlike = len(set(diff.nonfinite.values())) > 1
    return math.inf if unlike or diff.max_abs is None else float(diff.max_abs)


def _ranks(diff: TensorDiff, group: Group) -> tuple[int, ...]:
    return tuple(rank for found in diff.clusters for rank in found) or group.ranks


def _bins(ranks: Sequence[int]) -> list[Sequence[int]]:
    size = math.ceil(len(ranks) / MOST_COLUMNS)
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


def _rows(names: Sequence[str]) -> dict[str, list[str]]:
    """Sort names into rows: one each, or, where there are too many, the deepest modules that are few enough."""
    ordered = sorted(names, key=natural)
    if len(ordered) <= MOST_ROWS:
        return {name: [name] for name in ordered}
    depth = 1
    while len(_modules(ordered, depth + 1)) <= MOST_ROWS:
        depth += 1
    rows = _modules(ordered, depth)
    if len(rows) < _FEWEST_ROWS:
        rows = _ranges(rows, depth + 1)
    return {found[0] if len(found) == 1 else f"{label} ({len(found)})": found for label, found in rows.items()}


def _modules(names: Sequence[str], depth: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(".".join(name.split(".")[:depth]), []).append(name)
    return found


def _ranges(parents: Mapping[str, Sequence[str]], depth: int) -> dict[str, list[str]]:
    """Cut a few large modules into ranges of their children: 4,096 layers in one row would say nothing."""
    children = [list(_modules(names, depth).items()) for names in parents.values()]
    size = math.ceil(sum(map(len, children)) / (MOST_ROWS - len(parents)))
    found = {}
    for inside in children:
        for i in range(0, len(inside), size):
            part = inside[i : i + size]
            first, last = part[0][0], part[-1][0].rpartition(".")[2]
            label = first if len(part) == 1 else f"{first} to {last}"
            found[label] = [name for _, names in part for name in names]
    return found
