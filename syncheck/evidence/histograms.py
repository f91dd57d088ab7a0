"""How many elements of a tensor are how far apart: a look at those that differ most, where somebody asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from syncheck.differences.floats import pairs, widen
from syncheck.dtypes import DTYPES
from syncheck.evidence.suspects import sets_within
from syncheck.records import DECADES, Histogram
from syncheck.snapshots import flat_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from syncheck.dtypes import DType
    from syncheck.kernel.blocks import Files
    from syncheck.records import TensorDiff
    from syncheck.snapshots import Tensor

# Tensors of a group that are looked at, and elements of each: 40 such take some seconds.
MOST = 40
ELEMENTS = 1 << 22
_BLOCK = 1 << 16  # elements
_EDGES = np.array([float(f"1e{power}") for power in (*DECADES, DECADES.stop)])


def add_histograms(
    diffs: Sequence[TensorDiff],
    found: Mapping[str, Mapping[int, Tensor]],
    files: Files,
    exact: Callable[[TensorDiff], bool],
) -> tuple[TensorDiff, ...]:
    """Return the diffs, the floating-point ones that differ most with a histogram. found: tensors by name, rank.

    exact: whether no tolerance applies; else the gaps are those that are tested, between the farthest two replicas.
    Raises CheckpointError when a file can no longer be read.
    """
    differing = [diff for diff in diffs if diff.status == "different" and diff.mismatched]
    apart = [diff for diff in differing if DTYPES[diff.dtype].family == "float"]
    apart.sort(key=lambda diff: (len(set(diff.nonfinite.values())) < 2, -(diff.max_abs or 0)))
    made = {diff.name: _worst(diff, found[diff.name], files, exact=exact(diff)) for diff in apart[:MOST]}
    return tuple(replace(diff, histogram=made[diff.name]) if diff.name in made else diff for diff in diffs)


def _worst(diff: TensorDiff, tensors: Mapping[int, Tensor], files: Files, *, exact: bool) -> Histogram | None:
    """Return the histogram of the replica group of which most elements differ."""
    made = []
    for sets in sets_within(diff):
        # Against the only set outside the minority, if there is one.
        sets.sort(key=lambda ranks: not set(ranks).isdisjoint(diff.minority))
        majority = sum(set(ranks).isdisjoint(diff.minority) for ranks in sets) == 1
        replicas = [tensors[ranks[0]] for ranks in sets]
        made.append(_counted(replicas, files, _starts(diff), majority=majority and exact))
    return max(made, key=lambda one: one.elements - one.equal, default=None)


def _starts(diff: TensorDiff) -> list[int]:
    """Return where the blocks to look at begin: all, or of many evenly spread ones and that with the greatest gap."""
    blocks, most = -(-diff.numel // _BLOCK), ELEMENTS // _BLOCK
    chosen = set(range(blocks))
    if blocks > most:
        worst = flat_index(diff.index, diff.shape)
        chosen = {i * blocks // (most - 1) for i in range(most - 1)} | {worst // _BLOCK}
    return [block * _BLOCK for block in sorted(chosen)]


def _counted(replicas: Sequence[Tensor], files: Files, starts: Sequence[int], *, majority: bool) -> Histogram:
    row, numel = DTYPES[replicas[0].dtype], replicas[0].numel
    counts = np.zeros(len(_EDGES) + 1, np.int64)
    equal = not_finite = 0
    for start in starts:
        count = min(_BLOCK, numel - start)
        arrays = [_read(row, tensor, files, start, count, slot) for slot, tensor in enumerate(replicas)]
        differs = np.logical_or.reduce([arrays[0] != other for other in arrays[1:]])
        # NaN is not equal to itself, but the ranks agree on it.
        differs &= ~np.logical_and.reduce([np.isnan(array) for array in arrays])
        finite = differs & np.logical_and.reduce([np.isfinite(array) for array in arrays])
        equal += count - int(np.count_nonzero(differs))
        not_finite += int(np.count_nonzero(differs & ~finite))
        with np.errstate(over="ignore"):
            gaps = [high - low for low, high in pairs([array[finite] for array in arrays], majority)]
        places = np.searchsorted(_EDGES, np.maximum.reduce(gaps), side="right")
        counts += np.bincount(places, minlength=len(counts))
    return Histogram(equal, tuple(map(int, counts)), not_finite)


def _read(row: DType, tensor: Tensor, files: Files, start: int, count: int, slot: int) -> NDArray[Any]:
    # float64, or the smallest and the largest gaps would fall into the next decade.
    with np.errstate(invalid="ignore"):  # a signalling NaN is invalid to convert
        return widen(row, np.frombuffer(files.read(tensor, start, count, slot), row.dtype())).astype(np.float64)
