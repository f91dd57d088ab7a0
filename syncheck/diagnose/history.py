"""Follow the tensors of a finding over the steps of a run, and identify the ranks that cause their differences."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from syncheck.records import History, HistoryPoint
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.records import Comparison, TensorDiff, Trend

_COUNTERS = ("bn_count", "optimizer_step")
_TRAINED = ("parameter", *OPTIMIZER)

# Ratio of the differences of a tensor at the last and the first step. Constant differences change only by float32
# rounding over hundreds of steps; differences that amplify themselves more than double.
CONSTANT = 0.01
GROWING = 1.5


def history_of(names: Collection[str], groups: Sequence[Comparison]) -> History | None:
    """Return the history of tensors over the steps of a run; None with fewer than two steps or without differences.

    groups: the groups of one run, in the order of their steps. Only parameters and the optimizer count if the finding
    has any. Buffers, running statistics and averaged copies follow them, and may differ earlier for another reason.
    """
    kinds = {diff.name: diff.kind for group in groups for diff in group.tensors}
    of_model = {name for name in names if kinds.get(name) != "ema"} or names
    trained = {name for name in of_model if kinds.get(name) in _TRAINED}
    names = trained or {name for name in of_model if kinds.get(name) not in BN_STATISTICS} or of_model
    steps = [(group.step, _find_differing(names, group), group) for group in groups if group.step is not None]
    if len(steps) < 2 or not any(differing for _, differing, _ in steps):
        return None
    measured = _select_measured([differing for _, differing, _ in steps])
    points = tuple(
        HistoryPoint(step, len(differing), _find_largest(diffs), _have_others(names, group))
        for (step, differing, group), diffs in zip(steps, measured, strict=True)
    )
    first = next(i for i, (_, differing, _) in enumerate(steps) if differing)
    since, differing, group = steps[first]
    return History(
        points=points,
        since=since,
        agreed=steps[first - 1][0] if first else None,
        tensors=tuple(dict.fromkeys(diff.name for diff in (*measured[first], *differing))),
        ranks=suspects(differing, group),
        trend=trend_of(measured[first:]),
    )


def trend_of(steps: Sequence[Sequence[TensorDiff]]) -> Trend | None:
    """Return the trend of differences from the median ratio of the last to the first difference.

    steps: the diffs of each step. None if no tensor has differences at the first and the last step.
    """
    if len(steps) < 2:
        return None
    ratios = difference_ratios(steps[0], steps[-1])
    if not ratios:
        return None
    middle = median(ratios)
    near = [ratio for ratio in ratios if abs(ratio - middle) <= CONSTANT * middle]
    uniform = 2 * len(near) > len(ratios)
    if uniform and abs(middle - 1) <= CONSTANT:
        return "constant"
    if uniform and middle < 1:
        return "shrinking"
    return "growing" if middle >= GROWING else "varying"


def difference_ratios(before: Iterable[TensorDiff], after: Iterable[TensorDiff]) -> list[float]:
    """Return the ratio of the later to the earlier difference for each tensor with both."""
    earlier = {diff.name: float(diff.max_abs) for diff in before if diff.max_abs}
    return [float(diff.max_abs) / earlier[diff.name] for diff in after if diff.max_abs and diff.name in earlier]


def _find_differing(names: Collection[str], group: Comparison) -> list[TensorDiff]:
    return [diff for diff in group.tensors if diff.out_of_sync and diff.name in names]


def _have_others(names: Collection[str], group: Comparison) -> bool:
    """Whether other tensors, or any values, are out of sync at a step."""
    others = [diff.name for diff in group.tensors if diff.out_of_sync and diff.name not in names]
    return bool(others) or any(value.counts for value in group.values)


def _select_measured(steps: Sequence[list[TensorDiff]]) -> list[list[TensorDiff]]:
    """Return the diffs of each step whose size is followed: the same kinds of tensors at all steps with differences.

    Returns the parameters, or else all tensors except statistics and counters, or else all tensors except counters.
    Statistics depend on the batch of each step even if the difference of the weights is constant.
    """
    for chosen in (
        lambda diff: diff.kind == "parameter",
        lambda diff: diff.kind not in (*_COUNTERS, *BN_STATISTICS),
        lambda diff: diff.kind not in _COUNTERS,
    ):
        selected = [[diff for diff in diffs if chosen(diff)] for diffs in steps]
        if all(kept or not diffs for kept, diffs in zip(selected, steps, strict=True)):
            return selected
    return list(steps)


def _find_largest(diffs: Sequence[TensorDiff]) -> float | None:
    """Return the largest difference; None if a difference has no number."""
    if any(diff.max_abs is None for diff in diffs):
        return None
    return max((float(diff.max_abs or 0) for diff in diffs), default=0.0)


def suspects(tensors: Iterable[TensorDiff], group: Comparison) -> tuple[int, ...]:
    """Return the ranks outside the majority of the tensors. Without a majority, return all ranks with differences.

    If most of the tensors have no majority, a majority in a few of them does not count: for example, two ranks may
    agree on a bias that changes only by rounding.
    """
    # Running statistics differ between ranks without a fault, so they only count if no other tensor differs.
    diffs = list(tensors)
    diffs = [diff for diff in diffs if diff.kind not in BN_STATISTICS] or diffs
    odd = {rank for diff in diffs for rank in diff.minority}
    without = sum(len(diff.clusters) > 1 and not diff.minority for diff in diffs)
    if not odd or len(odd) >= len(group.replicas) or 2 * without > len(diffs):
        odd = {rank for diff in diffs for cluster in diff.clusters for rank in cluster}
    return tuple(sorted(odd)) or group.ranks


def last_agreement(names: Collection[str], groups: Sequence[Comparison]) -> int | None:
    """Return the last step before the last group at which all these tensors were compared and agreed; None without."""
    for group in reversed(groups[:-1]):
        unequal = {diff.name for diff in group.tensors if diff.out_of_sync or diff.status == "not_compared"}
        if group.evidence.names.keys() >= set(names) and unequal.isdisjoint(names):
            return group.step
    return None


def fewer(some: set[int], others: set[int]) -> set[int]:
    """Return the smaller set of ranks, which is suspect, or both sets if they are equally large."""
    return some | others if len(some) == len(others) else min(some, others, key=len)
