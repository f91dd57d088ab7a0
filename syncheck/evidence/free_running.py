"""Are BatchNorm's running statistics one update apart, or have they run freely? What the files of a run's steps tell.

Of rank 0's statistics s0 and another rank's s, with momentum m and d = s - s0 after t batches:

- synchronized before each forward: d = m (b - b0), of the last batch alone;
- never synchronized: d(t) = (1 - m) d(t-1) + m (b - b0), so each gap carries nine tenths of the one before.

Batches differ by a constant (shards of unlike data) and by chance. How much is which is not known, but both ways follow
from that one share, so the cosines and ratios of the gaps at several steps are held against both. Gaps of steps far
apart, or of late ones, look alike under both, and so nothing is concluded from them.

A proof needs no share: synchronized statistics start from rank 0's, and one batch can lower a variance to (1 - m) of
what it was at most. Where a rank's running variance lies below (1 - m)^n of rank 0's of n batches before, it has not
been copied from there since.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from syncheck.dtypes import DTYPES
from syncheck.errors import CheckpointError
from syncheck.kernel.blocks import Files
from syncheck.kinds import BN_STATISTICS
from syncheck.layout.groups import by_step
from syncheck.names import bn_sibling, by_normal_name
from syncheck.records import FreeRunning, Unreadable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from syncheck.layout.groups import ReplicaGroup
    from syncheck.records import Comparison
    from syncheck.snapshots import Tensor

    Vectors = Mapping[str, NDArray[np.float64]]

# torch's own, where the files do not say.
MOMENTUM = 0.1
# Bounds on what is read: a pattern that shows in these layers, channels, ranks and steps shows in all.
LAYERS, CHANNELS, RANKS, STEPS = 64, 4096, 8, 12
# Batches, as multiples of 1 / momentum, after which free-running statistics look as a lag does: they have reached
# their plateau. Measured on 2 and 4 ranks, momentum 0.1: of steps further apart, or first saved later, shards of
# unlike data with a lag came out as free-running now and then.
EARLY, FIRST, BETWEEN = 2.0, 0.4, 0.4
# What cosines scatter by over some hundred channels, and the logarithms of gaps, whose scale training changes too.
SPREAD, GROWTH_SPREAD = 0.15, 0.25
# A running variance is this much below the bound before it counts: rounding of float32 is far below.
MARGIN = 1e-3


@dataclass(frozen=True, slots=True)
class _Moment:
    """One step's statistics. batches: rank 0's count. values: by rank, then by name."""

    step: int
    batches: int
    values: Mapping[int, Vectors]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The gaps at two moments. cosine: mean over tensors; growth: median of the later norm by the earlier."""

    earlier: int
    later: int
    cosine: float
    growth: float


def add_free_running(
    groups: Sequence[Comparison],
    compared: Sequence[tuple[Comparison, ReplicaGroup]],
    unreadable: list[Unreadable],
    jobs: int | None,
) -> list[Comparison]:
    """Add to the last group of each run what its steps tell of the running statistics' synchronization.

    compared: the groups in the same order, with their files. A file that breaks while it is read is added to
    `unreadable`.
    """
    found = list(groups)
    runs = by_step(replicas for _, replicas in compared)
    for i, (group, (_, now)) in enumerate(zip(groups, compared, strict=True)):
        steps = runs.get(now.run, {})
        if now.step is None or len(steps) < 2 or now.step != max(steps) or not _apart(group):
            continue
        try:
            told = _of_run(group, list(steps.values()), jobs)
        except CheckpointError as error:
            unreadable.append(Unreadable(error.path, error.reason))
            continue
        found[i] = replace(group, evidence=replace(group.evidence, free_running=told))
    return found


def _apart(group: Comparison) -> bool:
    return any(diff.kind in BN_STATISTICS and diff.status == "different" for diff in group.tensors)


def _of_run(group: Comparison, series: Sequence[ReplicaGroup], jobs: int | None) -> FreeRunning | None:
    """Hold the statistics of a run's steps against both ways. series: in the order of the steps.

    Returns None where the files do not tell the counts, or fewer than two steps can be read.
    """
    momentum = _momentum(group)
    if momentum is None:
        return None
    names = [name for name, kind in group.evidence.names.items() if kind == "bn_mean"][:LAYERS]
    # The early ones tell most, and the last one is what the finding is about.
    chosen = list(series) if len(series) <= STEPS else [*series[: STEPS - 1], series[-1]]
    with Files(jobs=jobs) as files:
        read = [_moment(replicas, names, files) for replicas in chosen]
    moments = [moment for moment in read if moment is not None]
    if len(moments) < 2:
        return None
    recorded = group.evidence.metadata is not None and bool(group.evidence.metadata.bn_momentum)
    early = _usable([m for m in moments if m.batches <= EARLY / momentum], momentum)
    used = early or moments
    pairs = {(a.batches, b.batches): pair for a, b in combinations(used, 2) if (pair := _pair(a, b)) is not None}
    neighbours = [pairs[at] for a, b in pairwise(used) if (at := (a.batches, b.batches)) in pairs]
    if not neighbours:
        return None
    ends = pairs.get((used[0].batches, used[-1].batches), neighbours[-1])
    return FreeRunning(
        steps=tuple(moment.step for moment in used),
        cosine=fmean(pair.cosine for pair in neighbours),
        growth=ends.growth,
        misfit_free=_misfit(pairs.values(), momentum, free=True) if early else None,
        misfit_lag=_misfit(pairs.values(), momentum, free=False) if early else None,
        below=_below(moments, momentum) if recorded and series[-1].ranks[0][0] == 0 else 0,
    )


def _momentum(group: Comparison) -> float | None:
    """Return the layers' common momentum; None where they have several, or average over all batches."""
    recorded = set(group.evidence.metadata.bn_momentum.values()) if group.evidence.metadata is not None else set()
    if not recorded:
        return MOMENTUM
    momentum = recorded.pop()
    if recorded or not isinstance(momentum, (int, float)) or not 0 < momentum < 1:
        return None
    return float(momentum)


def _usable(early: Sequence[_Moment], momentum: float) -> list[_Moment]:
    """Return the moments from which something can be concluded: three or more, the first early, and close together."""
    between = [b.batches - a.batches for a, b in pairwise(early)]
    if len(early) < 3 or early[0].batches > FIRST / momentum or median(between) > BETWEEN / momentum:
        return []
    return list(early)


def _moment(replicas: ReplicaGroup, names: Sequence[str], files: Files) -> _Moment | None:
    """Read one step's statistics; None where ranks cannot be held against each other.

    That is where one lacks a statistic, has it in another shape, or has counted other batches than rank 0.
    """
    values: dict[int, dict[str, NDArray[np.float64]]] = {}
    counts = set()
    for rank, snapshot in replicas.ranks[: RANKS + 1]:
        tensors = by_normal_name(snapshot.tensors)
        values[rank] = {}
        for mean in names:
            for name in (mean, bn_sibling(mean, "running_var")):
                vector = _read(tensors.get(name), files)
                if vector is None:
                    return None
                values[rank][name] = vector
            count = _read(tensors.get(bn_sibling(mean, "num_batches_tracked")), files)
            if count is None or count.size != 1:
                return None
            counts.add(int(count[0]))
    shapes = {tuple(vector.size for vector in vectors.values()) for vectors in values.values()}
    if len(counts) != 1 or len(shapes) != 1 or len(values) < 2 or 0 in counts or replicas.step is None:
        return None
    return _Moment(replicas.step, counts.pop(), values)


def _read(tensor: Tensor | None, files: Files) -> NDArray[np.float64] | None:
    import numpy as np

    from syncheck.differences.floats import widen

    if tensor is None or tensor.refused or tensor.digest is not None or tensor.sharding is not None:
        return None
    row = DTYPES[tensor.dtype]
    data = np.frombuffer(bytes(files.read(tensor, 0, min(tensor.numel, CHANNELS), 0)), row.dtype())
    with np.errstate(invalid="ignore"):  # a signalling NaN is invalid to convert
        found = (widen(row, data) if row.family == "float" else data).astype(np.float64)
    return found if np.isfinite(found).all() else None


def _gaps(moment: _Moment) -> dict[tuple[int, str], NDArray[np.float64]]:
    (_, base), *others = moment.values.items()
    return {(rank, name): vector - base[name] for rank, vectors in others for name, vector in vectors.items()}


def _pair(a: _Moment, b: _Moment) -> _Pair | None:
    import numpy as np

    before, after = _gaps(a), _gaps(b)
    cosines, growths = [], []
    for key, x in before.items():
        y = after.get(key)
        if y is None or y.shape != x.shape:
            continue
        with np.errstate(over="ignore"):
            lengths = float(np.linalg.norm(x)), float(np.linalg.norm(y))
        if min(lengths) > 0 and max(lengths) < math.inf:
            cosines.append(float(x @ y) / (lengths[0] * lengths[1]))
            growths.append(lengths[1] / lengths[0])
    return _Pair(a.batches, b.batches, fmean(cosines), median(growths)) if cosines and a.batches < b.batches else None


def _misfit(pairs: Collection[_Pair], momentum: float, *, free: bool) -> float:
    """Return how far pairs are from what one way makes of them, in squares of the usual scatter.

    It is that of the share of constant differences that fits best.
    """
    best = math.inf
    for share in (i / 20 for i in range(21)):
        total = 0.0
        for pair in pairs:
            cosine, growth = _free(share, pair, momentum) if free else (share, 1.0)
            width = GROWTH_SPREAD * (1 + math.log(pair.later / pair.earlier))
            total += ((pair.cosine - cosine) / SPREAD) ** 2 + (math.log(pair.growth / growth) / width) ** 2
        best = min(best, total / len(pairs))
    return best


def _free(share: float, pair: _Pair, momentum: float) -> tuple[float, float]:
    """Return cosine and growth of statistics that run freely, of which `share` of the differences is constant."""
    kept = 1 - momentum

    def together(a: int, b: int) -> float:
        constant = (1 - kept**a) * (1 - kept**b)
        chance = momentum**2 * kept ** (b - a) * (1 - kept ** (2 * a)) / (1 - kept**2)
        return share * constant + (1 - share) * chance

    first, last = together(pair.earlier, pair.earlier), together(pair.later, pair.later)
    return together(pair.earlier, pair.later) / math.sqrt(first * last), math.sqrt(last / first)


def _below(moments: Sequence[_Moment], momentum: float) -> int:
    """Count running variances that lie lower than a copy from rank 0 since an earlier step leaves them; the most.

    Steps have to be two apart: DDP leaves one synchronization out after a forward without gradients.
    """
    most = 0
    for a, b in combinations(moments, 2):
        if b.step - a.step < 2:
            continue
        bound = (1 - momentum) ** (b.batches - a.batches) * (1 - MARGIN)
        (_, base), *_ = a.values.items()
        _, *others = b.values.values()
        below = sum(
            int((vector < bound * base[name]).sum())
            for vectors in others
            for name, vector in vectors.items()
            if name.endswith("running_var") and vector.shape == base[name].shape
        )
        most = max(most, below)
    return most
