"""Compute histograms of the differences of the tensors that differ most, for HTML reports."""

from __future__ import annotations

from dataclasses import replace
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


def add_histograms(
    diffs: Sequence[TensorDiff],
    replicas: Mapping[str, Mapping[int, Tensor]],
    files: Files,
    exact: Callable[[TensorDiff], bool],
) -> tuple[TensorDiff, ...]:
    """Return the diffs with histograms added to the floating-point tensors that differ most.

    replicas: tensors by name and rank. exact: returns False if a tolerance applies, which tests the lowest against the
    highest value of each element. Raises CheckpointError if a file can no longer be read.
    """
    differing = [diff for diff in diffs if diff.status == "different" and diff.mismatched]
    floats = [diff for diff in differing if DTYPES[diff.dtype].family == "float"]
    floats.sort(key=_rank_by_difference)
    histograms: dict[str, Histogram | None] = {}
    for diff in floats[:MOST]:
        histograms[diff.name] = _compute_histogram(diff, replicas[diff.name], files, exact=exact(diff))

    with_histograms = []
    for diff in diffs:
        if diff.name in histograms:
            diff = replace(diff, histogram=histograms[diff.name])

        with_histograms.append(diff)

    return tuple(with_histograms)


def _rank_by_difference(diff: TensorDiff) -> tuple[bool, float]:
    """Return a sort key: tensors that are not finite on some ranks first, then by the size of the difference."""
    is_finite = len(set(diff.nonfinite.values())) < 2
    return is_finite, -(diff.max_abs or 0)


def _compute_histogram(
    diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files, *, exact: bool
) -> Histogram | None:
    """Return the histogram of the replica group with the most different elements."""
    minority = set(diff.minority)

    def is_minority(ranks: Sequence[int]) -> bool:
        return not minority.isdisjoint(ranks)

    histograms = []
    for sets in sets_within(diff):
        # Measure against the only cluster outside the minority, if there is exactly one.
        sets.sort(key=is_minority)
        majorities = [ranks for ranks in sets if not is_minority(ranks)]
        representatives = [tensors[ranks[0]] for ranks in sets]
        has_majority = len(majorities) == 1 and exact
        histograms.append(_count(representatives, files, _choose_blocks(diff), majority=has_majority))

    return max(histograms, key=lambda histogram: histogram.elements - histogram.equal, default=None)


def _choose_blocks(diff: TensorDiff) -> list[int]:
    """Return the starts of the blocks to read: all, or evenly spaced blocks and that of the largest difference."""
    blocks = -(-diff.numel // _BLOCK)
    most = ELEMENTS // _BLOCK
    if blocks <= most:
        return [block * _BLOCK for block in range(blocks)]

    chosen = {ravel_index(diff.index, diff.shape) // _BLOCK}
    chosen.update(number * blocks // (most - 1) for number in range(most - 1))
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
        finite = differs & np.logical_and.reduce([np.isfinite(array) for array in arrays])
        equal += count - int(np.count_nonzero(differs))
        not_finite += int(np.count_nonzero(differs & ~finite))
        with np.errstate(over="ignore"):
            differences = [high - low for low, high in pairs([array[finite] for array in arrays], majority)]

        bins = np.searchsorted(_EDGES, np.maximum.reduce(differences), side="right")
        counts += np.bincount(bins, minlength=len(counts))

    return Histogram(equal, tuple(map(int, counts)), not_finite)
