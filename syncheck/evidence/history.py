"""How the tensors of a finding stood at each step of a run: since when they differ, and whether the gap grows."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from syncheck.evidence.suspects import suspects
from syncheck.kinds import BN_STATISTICS
from syncheck.records import History, HistoryPoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.records import Comparison, TensorDiff, Trend

_COUNTERS = ("bn_count", "optimizer_step")

# Ratios of a tensor's gap between the first and the last step: equal gaps keep theirs to float32's rounding over some
# hundred steps, and gaps that feed themselves more than double.
CONSTANT = 0.01
GROWING = 1.5


def history_of(names: Collection[str], groups: Sequence[Comparison]) -> History | None:
    """Return how tensors stood over the steps of a run; None with fewer than two steps, or where none ever differed.

    groups: of one run, in the order of their steps. Running statistics, which differ between ranks by themselves, are
    left out where they follow from other tensors: they tell nothing of when those went apart.
    """
    kinds = {diff.name: diff.kind for group in groups for diff in group.tensors}
    names = {name for name in names if kinds.get(name) not in BN_STATISTICS} or names
    steps = [(group.step, _apart(names, group), group) for group in groups if group.step is not None]
    if len(steps) < 2 or not any(apart for _, apart, _ in steps):
        return None
    gaps = _telling([apart for _, apart, _ in steps])
    points = tuple(
        HistoryPoint(step, len(apart), _largest(told)) for (step, apart, _), told in zip(steps, gaps, strict=True)
    )
    first = next(i for i, (_, apart, _) in enumerate(steps) if apart)
    since, apart, group = steps[first]
    return History(
        points=points,
        since=since,
        agreed=steps[first - 1][0] if first else None,
        tensors=tuple(dict.fromkeys(diff.name for diff in (*gaps[first], *apart))),
        ranks=suspects(apart, group),
        trend=trend_of(gaps[first:]),
    )


def trend_of(steps: Sequence[Sequence[TensorDiff]]) -> Trend | None:
    """Say what the gaps of tensors did over steps, by the median of each tensor's ratio of its last to its first gap.

    steps: what differed at each. None where fewer than two steps have gaps of the same tensors.
    """
    if len(steps) < 2:
        return None
    ratios = gap_ratios(steps[0], steps[-1])
    if not ratios:
        return None
    middle = median(ratios)
    near = [ratio for ratio in ratios if abs(ratio - middle) <= CONSTANT * middle]
    alike = 2 * len(near) > len(ratios)
    if alike and abs(middle - 1) <= CONSTANT:
        return "constant"
    if alike and middle < 1:
        return "shrinking"
    return "growing" if middle >= GROWING else "varying"


def gap_ratios(before: Iterable[TensorDiff], after: Iterable[TensorDiff]) -> list[float]:
    """Return the ratio of the later to the earlier gap of each tensor that has both."""
    gaps = {diff.name: float(diff.max_abs) for diff in before if diff.max_abs}
    return [float(diff.max_abs) / gaps[diff.name] for diff in after if diff.max_abs and diff.name in gaps]


def _apart(names: Collection[str], group: Comparison) -> list[TensorDiff]:
    return [diff for diff in group.tensors if diff.out_of_sync and diff.name in names]


def _telling(steps: Sequence[list[TensorDiff]]) -> list[list[TensorDiff]]:
    """Return what the gaps at each step are of: of all steps the same, as long as something there is apart.

    Parameters; else what is neither statistic nor counter, for statistics follow each step's batch even where weights
    stay apart by one gap, and counters are no weights; else all.
    """
    for chosen in (
        lambda diff: diff.kind == "parameter",
        lambda diff: diff.kind not in (*_COUNTERS, *BN_STATISTICS),
        lambda diff: diff.kind not in _COUNTERS,
    ):
        told = [[diff for diff in apart if chosen(diff)] for apart in steps]
        if all(found or not apart for found, apart in zip(told, steps, strict=True)):
            return told
    return list(steps)


def _largest(apart: Sequence[TensorDiff]) -> float | None:
    """Return the largest gap, None where one is not known."""
    if any(diff.max_abs is None for diff in apart):
        return None
    return max((float(diff.max_abs or 0) for diff in apart), default=0.0)
