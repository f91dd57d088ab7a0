"""Compute histograms of the differences of the tensors that differ most, for HTML reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from syncheck.records import DECADES, Histogram, sets_within
from syncheck.snapshots import ravel_index
from syncheck.tensors.differences import find_differing, pairs, read_float64
from syncheck.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor
    from syncheck.tensors.blocks import Files

# Maximum number of tensors per group, and of elements per tensor: a few seconds in total.
MOST = 40
ELEMENTS = 1 << 22
_BLOCK = 1 << 16  # elements
_EDGES = np.array([float(f"1e{power}") for power in (*DECADES, DECADES.stop)])


def compute_histograms(
    diffs: Sequence[TensorDiff],
    replicas: Mapping[str, Mapping[int, Tensor]],
    files: Files,
    exact: Callable[[TensorDiff], bool],
) -> dict[str, Histogram]:
    """Return histograms of the floating-point tensors that differ most, by name.

    replicas: tensors by name and rank. exact: returns False if a tolerance applies, which tests the lowest against the
    highest value of each element. Raises CheckpointError if a file can no longer be read.
    """
    floats = []
    for diff in diffs:
        is_measured = diff.status == "different" and bool(diff.mismatched)
        if is_measured and DTYPES[diff.dtype].family == "float":
            floats.append(diff)

    floats.sort(key=_rank_by_difference)
    histograms: dict[str, Histogram] = {}
    for diff in floats[:MOST]:
        histogram = _compute_histogram(
            diff,
            replicas[diff.name],
            files,
            exact=exact(diff),
        )
        # Only replica groups with several clusters have one.
        if histogram is not None:
            histograms[diff.name] = histogram

    return histograms


def _rank_by_difference(diff: TensorDiff) -> tuple[bool, float]:
    """Return a sort key: tensors that are not finite on some ranks first, then by the size of the difference."""
    is_finite = len(set(diff.nonfinite.values())) < 2
    return is_finite, -(diff.max_abs or 0)


def _compute_histogram(
    diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files, *, exact: bool
) -> Histogram | None:
    """Return the histogram of the replica group with the most different elements."""
    starts = _choose_blocks(diff)
    histograms = []
    for sets in sets_within(diff):
        majorities: list[Tensor] = []
        minorities: list[Tensor] = []
        for ranks in sets:
            is_minority = not set(ranks).isdisjoint(diff.minority)
            (minorities if is_minority else majorities).append(tensors[ranks[0]])

        # Measure against the only cluster outside the minority, if there is exactly one.
        histogram = _count(
            [*majorities, *minorities],
            files,
            starts,
            majority=exact and len(majorities) == 1,
        )
        histograms.append(histogram)

    return max(histograms, key=_count_different, default=None)


def _count_different(histogram: Histogram) -> int:
    return histogram.elements - histogram.equal


def _choose_blocks(diff: TensorDiff) -> list[int]:
    """Return the starts of the blocks to read: all, or evenly spaced blocks and that of the largest difference."""
    blocks = -(-diff.numel // _BLOCK)
    most = ELEMENTS // _BLOCK
    if blocks <= most:
        return list(range(0, diff.numel, _BLOCK))

    chosen = {ravel_index(diff.index, diff.shape) // _BLOCK}
    for number in range(most - 1):
        chosen.add(number * blocks // (most - 1))

    return [block * _BLOCK for block in sorted(chosen)]


def _count(replicas: Sequence[Tensor], files: Files, starts: Sequence[int], *, majority: bool) -> Histogram:
    numel = replicas[0].numel
    counts = np.zeros(len(_EDGES) + 1, np.int64)
    equal = not_finite = 0
    for start in starts:
        count = min(_BLOCK, numel - start)
        # float64, because rounding in float32 moves the smallest and largest differences into the next decade.
        arrays = [read_float64(tensor, files, start, count, slot) for slot, tensor in enumerate(replicas)]
        differs = find_differing(arrays)
        measured = differs.copy()
        for array in arrays:
            measured &= np.isfinite(array)

        equal += count - int(np.count_nonzero(differs))
        not_finite += int(np.count_nonzero(differs & ~measured))
        arrays = [array[measured] for array in arrays]
        with np.errstate(over="ignore"):
            differences = [high - low for low, high in pairs(arrays, majority)]

        bins = np.searchsorted(_EDGES, np.maximum.reduce(differences), side="right")
        counts += np.bincount(bins, minlength=len(counts))

    return Histogram(equal, tuple(counts.tolist()), not_finite)
