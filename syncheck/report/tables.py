"""Cells and rows of the tables of several formats: tensors and their differences, kinds, drift, Python values."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from syncheck.records import MEASURED, sets_within
from syncheck.report.selections import write_first
from syncheck.sentences import Sentence, write_plain
from syncheck.text import Side, brief, one_line, owner_text, ranges_text, shorten

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from syncheck.records import Counts, DriftPoint, Group, Place, Report, TensorDiff, ValueDiff
    from syncheck.sentences import Message, Writer

# Columns of `difference_cells`, besides the number of differing elements.
NUMBERS = ("max abs", "max rel", "max ulp")
# The largest difference relative to the root mean square of the tensor, which is its scale.
SCALE = "max/rms"
# Rounding explains at most this number of representable values between two replicas.
_FEW_ULP = 64
# Values, and ranks of each value.
_MOST_VALUES, _MOST_RANKS = 5, 4
_MOST_SETS = 4
# Tensors whose differences matter less, or are on another scale, follow the others.
_ORDER_OF_KINDS = {"bn_mean": 1, "bn_var": 1, "bn_count": 2, "optimizer_step": 2}
# The order of a reader: the model before the optimizer, and values before counters. Further kinds come last.
_READING_ORDER = {
    "parameter": 0,
    "buffer": 1,
    "bn_mean": 1,
    "bn_var": 1,
    "bn_count": 2,
    "ema": 3,
    "optimizer": 4,
    "optimizer_step": 5,
}
_LAST = 6
# Reasons of tensors that are counted but not listed: RNG states differ by design, and B may lack tensors of A.
_UNLISTED = ("rng", "subset")


class Cell(Sentence):
    """How many elements of a tensor differ, or why it was not compared."""

    REASON = "{reason:words}: {detail}"
    BY_REASON = "by {reason:words}: {detail}"
    CLOSE = "close: {tolerance}"
    DIFFERING = "{count} of {total}"
    NOT_FINITE = "{cell} (not finite {owners:words})"
    DIFFERING_CLOSE = "{cell}, close: {tolerance}"


class Location(Sentence):
    """The files with the largest difference of a tensor of two models."""

    LARGEST = "largest difference of {tensor:name}: {places:list}"
    FILE = "{side:ranks} {path:name}"
    FILE_OF_RANK = "{side:ranks} {path:name} (rank {rank})"
    STORED = "{file}, {element:name}"


def columns(group: Group) -> tuple[str, ...]:
    """Return the headings of the table of tensors, for `cells`."""
    return ("tensor", "kind", "worst at" if group.is_pair else "ranks", "differing", *NUMBERS)


def cells(diff: TensorDiff, group: Group, write: Writer = write_plain) -> tuple[str, ...]:
    """Return the row of a tensor in the table: for two models with the index of the worst element, else with ranks."""
    if not group.is_pair:
        location = clusters_text(diff)
    elif diff.index is None:
        location = ""
    else:
        location = str(list(diff.index))
    return diff.name, diff.kind, location, *difference_cells(diff, write)


def clusters_text(diff: TensorDiff) -> str:
    """Return the sets of ranks with equal values: '0,2,3 | 1', or '0 | 2; 1 | 3' for several replica groups."""
    sets_by_group = sets_within(diff)
    # Sets of different replica groups must not look like replicas that differ.
    if len(sets_by_group) < 2:
        return _sets_text(diff.clusters)
    return "; ".join(write_first(sets_by_group, _MOST_SETS, _sets_text, ending="{} more"))


def _sets_text(sets: Sequence[tuple[int, ...]]) -> str:
    # Each rank may have its own value, on thousands of ranks.
    return " | ".join(write_first(sets, _MOST_SETS, ranges_text, ending="{} more"))


def difference_cells(diff: TensorDiff, write: Writer = write_plain) -> tuple[str, str, str, str]:
    """Return differing elements, max abs, max rel and max ULP of a tensor, or why it was not compared.

    write: writes the names in the first cell.
    """
    differing = one_line(_describe_difference(diff).render(write))
    if diff.status == "not_compared":
        return differing, "", "", ""
    if diff.mismatched is None:
        return differing, "-", "-", "-"
    return differing, difference_text(diff.max_abs), number_cell(diff.max_rel, ".2%"), number_cell(diff.max_ulp)


def _describe_difference(diff: TensorDiff) -> Message:
    if diff.status == "not_compared":
        return Cell.REASON(reason=str(diff.reason), detail=diff.detail)
    if diff.mismatched is not None:
        return _describe_mismatches(diff, diff.mismatched)
    if diff.reason:
        return Cell.BY_REASON(reason=diff.reason, detail=diff.detail)

    # Tensors of different dtypes that are close after a conversion have no reason.
    return Cell.CLOSE(tolerance=diff.tolerance)


def _describe_mismatches(diff: TensorDiff, count: int) -> Message:
    """Return how many elements differ. count: their number."""
    cell = Cell.DIFFERING(count=count, total=diff.numel)
    ranks_not_finite = [rank for rank, nonfinite in diff.nonfinite.items() if nonfinite]
    if 0 < len(ranks_not_finite) < len(diff.nonfinite):
        owners = "in one model" if isinstance(ranks_not_finite[0], Side) else "on some ranks"
        cell = Cell.NOT_FINITE(cell=cell, owners=owners)
    if diff.status == "close":
        return Cell.DIFFERING_CLOSE(cell=cell, tolerance=diff.tolerance)

    return cell


def scale_cell(diff: TensorDiff) -> str:
    """Return the largest difference divided by the root mean square of the tensor, or a dash if either is unknown."""
    if diff.evidence is None or diff.max_abs is None:
        return "-"
    # The majority has the right scale: the values of another rank may have exploded.
    norm = diff.evidence.norms.get(diff.clusters[0][0])
    if not norm:
        return "-"
    rms = norm / math.sqrt(min(diff.numel, MEASURED))
    return difference_text(diff.max_abs / rms)


def are_few_ulp(diffs: Iterable[TensorDiff]) -> bool:
    """Whether so few representable values separate the replicas of a tensor that rounding explains its difference."""
    return any(0 < (diff.max_ulp or 0) <= _FEW_ULP for diff in diffs)


def difference_text(difference: float | None) -> str:
    """Return a difference with three digits, or a dash if it is unknown."""
    return number_cell(difference, ".3g")


def number_cell(number: float | None, format_spec: str = "") -> str:
    """Return a number in a format of `str.format`, or a dash if it is unknown."""
    return "-" if number is None else format(number, format_spec)


def place_lines(diffs: Iterable[TensorDiff], group: Group, write: Writer = write_plain) -> list[str]:
    """Return the files with the largest difference of each tensor, if two models differ and one has several files."""
    if not group.is_pair:
        return []

    # The paths of two models in one file each, without a map, are known.
    is_worth_a_line = any(replica.files > 1 for replica in group.replicas)
    lines = []
    for diff in diffs:
        descriptions = []
        for side, place in diff.places.items():
            replica = group.replicas[side]
            descriptions.append(_describe_place(place, side, in_memory=replica.format == "memory"))
            is_worth_a_line |= bool(place.tensor)
        if descriptions:
            lines.append(Location.LARGEST(tensor=diff.name, places=descriptions).render(write))

    return lines if is_worth_a_line else []


def _describe_place(place: Place, side: int, *, in_memory: bool) -> Message:
    """Return a side with its file. in_memory: whether it is a model of a running job."""
    # The path of a model in memory states the rank.
    if place.rank is None or in_memory:
        file = Location.FILE(side=(side,), path=place.path)
    else:
        file = Location.FILE_OF_RANK(side=(side,), path=place.path, rank=place.rank)
    if not place.tensor:
        return file

    index = list(place.index) if place.index else ""
    return Location.STORED(file=file, element=f"{place.tensor}{index}")


def sort_worst_first(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Sort tensors by importance.

    Tensors out of sync come first, then NaN or infinity on some ranks only, then larger differences. Running
    statistics, which always drift a little under DDP, follow the parameters. Counters come last, because they count
    steps and their differences are on another scale.
    """
    return sorted(diffs, key=_importance)


def _importance(diff: TensorDiff) -> tuple[object, ...]:
    is_nonfinite = len(set(diff.nonfinite.values())) > 1
    order = _ORDER_OF_KINDS.get(diff.kind, 0)
    return not diff.out_of_sync, diff.status != "not_compared", not is_nonfinite, order, -(diff.max_abs or 0)


def sort_by_kind(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Sort tensors for a reader: out of sync first, then by kind, and the worst of each kind first."""
    return sorted(diffs, key=_reading_order)


def _reading_order(diff: TensorDiff) -> tuple[object, ...]:
    return not diff.out_of_sync, _READING_ORDER.get(diff.kind, _LAST), _importance(diff)


def tensors_to_list(group: Group, *, shards: bool = True) -> list[TensorDiff]:
    """Return the tensors to list in a report, worst first. shards: include tensors stored only as shards."""
    unlisted = _UNLISTED if shards else (*_UNLISTED, "sharded")
    return sort_worst_first(diff for diff in group.tensors if diff.reason not in unlisted)


def drift_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Return run, step, largest drift and its tensor; steps with equal values share one row."""
    rows = []
    for (run, drift, tensor), points in groupby(report.drift, _drift_of_point):
        steps = [point.step for point in points if point.step is not None]
        rows.append((run, _steps_text(steps), f"{drift:.4g}", tensor or "-"))
    return rows


def _steps_text(steps: Sequence[int]) -> str:
    """Return the first and the last step: '100-300'."""
    if not steps:
        return "-"
    if len(steps) == 1:
        return str(steps[0])
    return f"{steps[0]}-{steps[-1]}"


def _drift_of_point(point: DriftPoint) -> tuple[str, float, str | None]:
    return point.run, point.max_abs, point.tensor


def list_kinds(groups: Iterable[Group]) -> list[str]:
    """Return the kinds of tensors in any of the groups."""
    kinds: dict[str, None] = {}
    for group in groups:
        kinds.update(dict.fromkeys(group.kinds))
    return list(kinds)


def kind_cell(counts: Counts) -> str:
    """Return the result of one kind of tensor: '20 agree', '9/20 differ'."""
    if not counts.tensors:
        return "-"

    number_of_text = {
        f"{counts.different}/{counts.tensors} differ": counts.different,
        f"{counts.not_compared} not compared": counts.not_compared,
        f"{counts.close} close": counts.close,
    }
    parts = [text for text, number in number_of_text.items() if number]
    return ", ".join(parts) or f"{counts.tensors} agree"


def values_text(values: Iterable[ValueDiff]) -> str:
    """Return the Python values that differ: 'lr: 0.1 on rank 0, 0.2 on rank 1'. Skips values missing on some ranks."""
    complete = []
    for value in values:
        # A note names the attributes that differ.
        if None not in value.by_rank.values() and value.kind != "attribute":
            complete.append(value)
    return "; ".join(write_first(complete, _MOST_VALUES, _value_text))


def _value_text(value: ValueDiff) -> str:
    texts = []
    for rank, content in list(value.by_rank.items())[:_MOST_RANKS]:
        texts.append(f"{brief(content, 40)} {owner_text((rank,))}")
    return f"{shorten(value.name)}: {', '.join(texts)}"
