"""Decide whether BatchNorm's running statistics lag by one update or are unsynchronized, from several steps of a run.

Let d = s - s0 be the difference between the statistics of a rank and of rank 0 after t batches, m the momentum, and
b, b0 the statistics of the batches of both ranks:

- synchronized before each forward pass: d = m (b - b0), from the last batch alone;
- unsynchronized: d(t) = (1 - m) d(t-1) + m (b - b0), so with m = 0.1 nine tenths of each difference remain.

b - b0 has a constant part (the ranks' data have different distributions) and a random part. The share of the constant
part is unknown. For each share, both models predict the cosines and ratios of the differences at several steps, and the
observed values are compared with both models. For late steps and steps far from each other, the predictions are too
similar, so these steps are not used.

A low variance is a proof that needs no share: one batch multiplies a running variance by at least (1 - m). If the
running variance of a rank is below (1 - m)^n times that of rank 0 n batches earlier, it has not been copied from rank 0
since.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from syncheck.errors import CheckpointError
from syncheck.frozen import record
from syncheck.layout.groups import group_by_step
from syncheck.records import FreeRunning, Unreadable
from syncheck.tensors.blocks import Files, has_elements
from syncheck.tensors.kinds import BN_STATISTICS
from syncheck.tensors.names import normalize_keys, sibling_name

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from syncheck.layout.groups import CheckpointGroup
    from syncheck.records import Comparison
    from syncheck.snapshots import Tensor

    Vectors = Mapping[str, NDArray[np.float64]]

# torch's default, if the files do not contain the momentum.
MOMENTUM = 0.1
# Maximum number of layers, channels, ranks besides rank 0, and steps to read.
LAYERS, CHANNELS, RANKS, STEPS = 64, 4096, 8, 12
# In batches, as multiples of 1 / momentum: the last usable step, the latest first step, and the largest median distance
# between steps. Later, unsynchronized statistics have reached their plateau and look like a lag. Measured on 2 and 4
# ranks with momentum 0.1: above these bounds, lagging statistics of ranks with different data distributions were
# sometimes classified as unsynchronized.
EARLY, FIRST, BETWEEN = 2.0, 0.4, 0.4
# Standard deviation of the cosines over some hundred channels, and of the logarithms of the ratios, which training also
# changes.
SPREAD, GROWTH_SPREAD = 0.15, 0.25
# Number of steps between the shares 0 and 1 of the constant part that are tried.
_SHARES = 20
# Relative margin below the bound of running variances, far above float32 rounding.
MARGIN = 1e-3


@record
class Moment:
    """The statistics at one step. batches: the batch count of all ranks. values: by rank and name."""

    step: int
    batches: int
    values: Mapping[int, Vectors]


@record
class _Pair:
    """The differences at two moments, given by their batch counts.

    cosine: mean over tensors. growth: median ratio of the later to the earlier norm.
    """

    earlier: int
    later: int
    cosine: float
    growth: float


class _UnusableStep(Exception):
    """The statistics of a step cannot be compared with the statistics of other steps."""


def add_free_running(
    groups: Sequence[Comparison],
    compared: Sequence[tuple[Comparison, CheckpointGroup]],
    unreadable: list[Unreadable],
    jobs: int | None,
) -> list[Comparison]:
    """Add evidence about the synchronization of running statistics to the last group of each run.

    compared: the same groups with their files. Files that cannot be read any more are added to `unreadable`.
    """
    result = list(groups)
    runs = group_by_step(replicas for _, replicas in compared)
    for i, (group, (_, now)) in enumerate(zip(groups, compared, strict=True)):
        series = _list_series(now, runs)
        if not series or not _statistics_differ(group):
            continue

        try:
            free_running = _analyze_run(group, series, jobs)
        except CheckpointError as error:
            unreadable.append(Unreadable(error.path, error.reason))
            continue

        evidence = replace(group.evidence, free_running=free_running)
        result[i] = replace(group, evidence=evidence)

    return result


def _list_series(now: CheckpointGroup, runs: Mapping[str, Mapping[int, CheckpointGroup]]) -> list[CheckpointGroup]:
    """Return the steps of a run, if there are several and the group is the last. runs: by run and step, in order."""
    steps = runs.get(now.run, {})
    is_last = now.step == max(steps, default=None)
    return list(steps.values()) if is_last and len(steps) > 1 else []


def _statistics_differ(group: Comparison) -> bool:
    return any(diff.kind in BN_STATISTICS and diff.status == "different" for diff in group.tensors)


def _analyze_run(group: Comparison, series: Sequence[CheckpointGroup], jobs: int | None) -> FreeRunning | None:
    """Compare the statistics of a run with both models. series: the groups of files in the order of the steps.

    Returns None if the files have no common batch count, or fewer than two steps can be used.
    """
    momentum = _find_momentum(group)
    if momentum is None:
        return None

    moments = _read_moments(group, series, jobs)
    course = analyze_moments(moments, momentum)
    if course is None:
        return None
    first_rank, _ = series[-1].ranks[0]
    # Only a known momentum bounds variances.
    if not group.evidence.metadata.bn_momentum:
        return course
    # Only rank 0 is the source of DDP's buffers.
    if first_rank != 0:
        return course
    return replace(course, below=_count_low_variances(moments, momentum))


def analyze_moments(moments: Sequence[Moment], momentum: float) -> FreeRunning | None:
    """Compare the statistics of a run at several steps with both models; None if fewer than two steps can be used."""
    last_batch = EARLY / momentum
    early = _select_usable([moment for moment in moments if moment.batches <= last_batch], momentum)
    used = early or moments
    pairs = _pair_moments(used)
    batches = [moment.batches for moment in used]
    neighbors = [pairs[counts] for counts in pairwise(batches) if counts in pairs]
    if not neighbors:
        return None

    ends = pairs.get((batches[0], batches[-1]), neighbors[-1])
    # Late steps look the same in both models.
    misfit_free = misfit_lag = None
    if early:
        misfit_free = _fit(pairs.values(), momentum, free=True)
        misfit_lag = _fit(pairs.values(), momentum, free=False)

    return FreeRunning(
        steps=tuple(moment.step for moment in used),
        cosine=fmean(pair.cosine for pair in neighbors),
        growth=ends.growth,
        misfit_free=misfit_free,
        misfit_lag=misfit_lag,
    )


def _pair_moments(moments: Sequence[Moment]) -> dict[tuple[int, int], _Pair]:
    """Return the pairs of moments that can be compared, by their batch counts."""
    pairs: dict[tuple[int, int], _Pair] = {}
    for first, second in combinations(moments, 2):
        pair = _make_pair(first, second)
        if pair is not None:
            pairs[first.batches, second.batches] = pair

    return pairs


def _read_moments(group: Comparison, series: Sequence[CheckpointGroup], jobs: int | None) -> list[Moment]:
    """Return the statistics of the steps that can be used. Parameters as in `_analyze_run`."""
    names = [name for name, kind in group.evidence.names.items() if kind == "bn_mean"][:LAYERS]
    # Early steps separate the models best, and the finding is about the last step.
    if len(series) > STEPS:
        series = [*series[: STEPS - 1], series[-1]]

    moments: list[Moment] = []
    with Files(jobs=jobs) as files:
        for replicas in series:
            with suppress(_UnusableStep):
                moments.append(_read_moment(replicas, names, files))

    return moments


def _find_momentum(group: Comparison) -> float | None:
    """Return the momentum of all layers; None if layers have different momentums or cumulative averages."""
    recorded = set(group.evidence.metadata.bn_momentum.values())
    if not recorded:
        return MOMENTUM

    momentum, *other_momentums = recorded
    if other_momentums:
        return None

    # torch's cumulative average has no momentum.
    if not isinstance(momentum, (int, float)) or not 0 < momentum < 1:
        return None

    return float(momentum)


def _select_usable(early: Sequence[Moment], momentum: float) -> list[Moment]:
    """Return the moments if they suffice: at least three, close to each other, beginning early; else an empty list."""
    if len(early) < 3 or early[0].batches > FIRST / momentum:
        return []

    distances = [b.batches - a.batches for a, b in pairwise(early)]
    if median(distances) > BETWEEN / momentum:
        return []

    return list(early)


def _read_moment(replicas: CheckpointGroup, names: Sequence[str], files: Files) -> Moment:
    """Read the statistics of one step. Raises _UnusableStep if some are missing, or shapes or batch counts differ."""
    values: dict[int, dict[str, NDArray[np.float64]]] = {}
    counts: set[int] = set()
    shapes: set[tuple[int, ...]] = set()
    for rank, snapshot in replicas.ranks[: RANKS + 1]:
        layers = _read_layers(normalize_keys(snapshot.tensors), names, files)
        values[rank] = layers.statistics
        counts.update(layers.counts)
        shapes.add(tuple(vector.size for vector in layers.statistics.values()))

    # One rank has nothing to differ from.
    if len(values) < 2:
        raise _UnusableStep

    # Both models need one number of batches for all layers and ranks.
    if len(counts) != 1 or len(shapes) != 1:
        raise _UnusableStep

    # Before the first batch, statistics have their initial values.
    batches = counts.pop()
    if batches == 0:
        raise _UnusableStep

    assert replicas.step is not None, "the groups of a run have steps"
    return Moment(replicas.step, batches, values)


class _Layers(NamedTuple):
    """The running statistics of one rank by name, and the batch counts of its layers."""

    statistics: dict[str, NDArray[np.float64]]
    counts: set[int]


def _read_layers(tensors: Mapping[str, Tensor], names: Sequence[str], files: Files) -> _Layers:
    """Read the statistics of the layers of one rank. names: of running means. Raises _UnusableStep."""
    layers = _Layers({}, set())
    for mean in names:
        for name in (mean, sibling_name(mean, "running_var")):
            layers.statistics[name] = _read(tensors.get(name), files)

        count = _read(tensors.get(sibling_name(mean, "num_batches_tracked")), files)
        if count.size != 1:
            raise _UnusableStep

        layers.counts.add(int(count[0]))

    return layers


def _read(tensor: Tensor | None, files: Files) -> NDArray[np.float64]:
    """Read the first channels of a statistic. Raises _UnusableStep if it is missing, or not finite."""
    import numpy as np

    from syncheck.tensors.differences import read_float64

    if tensor is None or not has_elements(tensor):
        raise _UnusableStep

    count = min(tensor.numel, CHANNELS)
    values = read_float64(tensor, files, 0, count, 0)
    if not np.isfinite(values).all():
        raise _UnusableStep

    return values


def _subtract_rank0(moment: Moment) -> dict[tuple[int, str], NDArray[np.float64]]:
    """Return the differences between later ranks and the first rank, by rank and name."""
    (_, base), *later_ranks = moment.values.items()
    differences: dict[tuple[int, str], NDArray[np.float64]] = {}
    for rank, vectors in later_ranks:
        for name, vector in vectors.items():
            differences[rank, name] = vector - base[name]

    return differences


def _make_pair(a: Moment, b: Moment) -> _Pair | None:
    """Return the differences at two moments; None if nothing can be compared."""
    import numpy as np

    differences_before = _subtract_rank0(a)
    differences_after = _subtract_rank0(b)
    cosines: list[float] = []
    growths: list[float] = []
    for key, before in differences_before.items():
        after = differences_after.get(key)
        if after is None or after.shape != before.shape:
            continue

        with np.errstate(over="ignore"):
            lengths = np.linalg.norm(before), np.linalg.norm(after)

        length_before, length_after = map(float, lengths)
        # A zero vector has no direction.
        if min(lengths) == 0:
            continue

        # On overflow.
        if max(lengths) == math.inf:
            continue

        cosine = float(before @ after) / (length_before * length_after)
        cosines.append(cosine)
        growths.append(length_after / length_before)

    if not cosines:
        return None

    # Both models need a number of batches between the moments.
    if a.batches >= b.batches:
        return None

    return _Pair(
        earlier=a.batches,
        later=b.batches,
        cosine=fmean(cosines),
        growth=median(growths),
    )


def _fit(pairs: Collection[_Pair], momentum: float, *, free: bool) -> float:
    """Return the mean squared error of one model with the best share, in units of the standard deviations."""
    best = math.inf
    for step in range(_SHARES + 1):
        share = step / _SHARES
        total = 0.0
        for pair in pairs:
            # Synchronized differences come from the last batch alone, so they do not grow.
            cosine, growth = share, 1.0
            if free:
                cosine, growth = _predict_unsynchronized(share, pair, momentum)

            # Training changes the ratios of distant steps more.
            width = GROWTH_SPREAD * (1 + math.log(pair.later / pair.earlier))
            misfit_of_cosine = ((pair.cosine - cosine) / SPREAD) ** 2
            misfit_of_growth = (math.log(pair.growth / growth) / width) ** 2
            total += misfit_of_cosine + misfit_of_growth

        best = min(best, total / len(pairs))

    return best


def _predict_unsynchronized(share: float, pair: _Pair, momentum: float) -> tuple[float, float]:
    """Return the cosine and growth of unsynchronized statistics, if `share` of the batch differences is constant."""
    decay = 1 - momentum

    def covariance(a: int, b: int) -> float:
        constant = (1 - decay**a) * (1 - decay**b)
        # The random parts of the first `a` batches are in both differences.
        random = momentum**2 * decay ** (b - a) * (1 - decay ** (2 * a)) / (1 - decay**2)
        return share * constant + (1 - share) * random

    variance_before = covariance(pair.earlier, pair.earlier)
    variance_after = covariance(pair.later, pair.later)
    cosine = covariance(pair.earlier, pair.later) / math.sqrt(variance_before * variance_after)
    return cosine, math.sqrt(variance_after / variance_before)


def _count_low_variances(moments: Sequence[Moment], momentum: float) -> int:
    """Count the running variances that are too low to have been copied from rank 0 since an earlier step.

    Returns the maximum over all pairs of steps. The steps differ by at least 2, because DDP skips one synchronization
    after a forward pass without gradients.
    """
    most = 0
    for first, second in combinations(moments, 2):
        if second.step - first.step < 2:
            continue

        batches = second.batches - first.batches
        factor = (1 - momentum) ** batches * (1 - MARGIN)
        base, *_ = first.values.values()
        _, *later_ranks = second.values.values()
        below = 0
        for vectors in later_ranks:
            for name, vector in vectors.items():
                is_variance = name.endswith("running_var")
                if is_variance and vector.shape == base[name].shape:
                    bound = factor * base[name]
                    below += int((vector < bound).sum())

        most = max(most, below)

    return most
