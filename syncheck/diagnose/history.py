"""Follow the tensors of a finding over the steps of a run, and identify the ranks that cause their differences."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.selection import (
    exclude_kinds,
    exclude_names,
    holders_of,
    list_names,
    minorities_of,
    out_of_sync,
    select_kinds,
    select_names,
    with_status,
)
from syncheck.records import History, HistoryPoint
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.records import Comparison, TensorDiff, Trend

# Counters show when the ranks began to differ, but not how much the model differs.
_COUNTERS = ("bn_count", "optimizer_step")
_TRAINED = ("parameter", *OPTIMIZER)

# Ratio of the differences of a tensor at the last and the first step. Constant differences change only by float32
# rounding over hundreds of steps; differences that amplify themselves more than double.
CONSTANT = 0.01
GROWING = 1.5


class _Step(NamedTuple):
    """The tensors of a finding that differ at one step."""

    number: int
    group: Comparison
    differing: list[TensorDiff]


def history_of(names: Collection[str], groups: Sequence[Comparison]) -> History | None:
    """Return the history of tensors over the steps of a run; None with fewer than two steps or without differences.

    groups: the groups of one run, in the order of their steps. Only parameters and the optimizer count if the finding
    has any. Buffers, running statistics and averaged copies follow them, and may differ earlier for another reason.
    """
    followed = _select_followed(names, groups)
    steps = []
    for group in groups:
        if group.step is not None:
            steps.append(_Step(group.step, group, select_names(out_of_sync(group), followed)))
    differing_by_step = [step.differing for step in steps]
    first = count_agreeing(differing_by_step)
    # A single step has no history.
    if len(steps) < 2 or first == len(steps):
        return None
    measured_by_step = _select_measured(differing_by_step)
    points = []
    for step, measured in zip(steps, measured_by_step, strict=True):
        others_differ = _have_others(followed, step.group)
        points.append(HistoryPoint(step.number, len(step.differing), _find_largest(measured), others_differ))
    begin = steps[first]
    return History(
        points=tuple(points),
        since=begin.number,
        agreed=steps[first - 1].number if first else None,
        tensors=tuple(dict.fromkeys(list_names((*measured_by_step[first], *begin.differing)))),
        ranks=suspects(begin.differing, begin.group),
        trend=trend_of(measured_by_step[first:]),
    )


def _select_followed(names: Collection[str], groups: Sequence[Comparison]) -> Collection[str]:
    """Return the names whose differences are followed: of trained tensors, or else of the model, or else all."""
    kinds: dict[str, str] = {}
    for group in groups:
        kinds.update((diff.name, diff.kind) for diff in group.tensors)
    # An averaged copy differs longer than the model, and later.
    of_model = {name for name in names if kinds.get(name) != "ema"} or names
    trained = {name for name in of_model if kinds.get(name) in _TRAINED}
    without_statistics = {name for name in of_model if kinds.get(name) not in BN_STATISTICS}
    return trained or without_statistics or of_model


def count_agreeing(steps: Sequence[Sequence[TensorDiff]]) -> int:
    """Return how many steps come before the first step with differences; all steps if none has any."""
    for position, differing in enumerate(steps):
        if differing:
            return position
    return len(steps)


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
    close_ratios = [ratio for ratio in ratios if abs(ratio - middle) <= CONSTANT * middle]
    is_uniform = 2 * len(close_ratios) > len(ratios)
    if is_uniform and abs(middle - 1) <= CONSTANT:
        return "constant"
    if is_uniform and middle < 1:
        return "shrinking"
    return "growing" if middle >= GROWING else "varying"


def difference_ratios(before: Iterable[TensorDiff], after: Iterable[TensorDiff]) -> list[float]:
    """Return the ratio of the later to the earlier difference for each tensor with both."""
    earlier = {diff.name: float(diff.max_abs) for diff in before if diff.max_abs}
    ratios = []
    for diff in after:
        if diff.max_abs and diff.name in earlier:
            ratios.append(float(diff.max_abs) / earlier[diff.name])
    return ratios


def _have_others(names: Collection[str], group: Comparison) -> bool:
    """Whether other tensors, or any values, are out of sync at a step."""
    if exclude_names(out_of_sync(group), names):
        return True
    return any(value.counts for value in group.values)


def _select_measured(steps: Sequence[list[TensorDiff]]) -> list[list[TensorDiff]]:
    """Return the diffs of each step whose size is followed: the same kinds of tensors at all steps with differences.

    Returns the parameters, or else all tensors except statistics and counters, or else all tensors except counters.
    Statistics depend on the batch of each step even if the difference of the weights is constant.
    """
    candidates = (
        [select_kinds(diffs, "parameter") for diffs in steps],
        [exclude_kinds(diffs, *_COUNTERS, *BN_STATISTICS) for diffs in steps],
        [exclude_kinds(diffs, *_COUNTERS) for diffs in steps],
    )
    differing_steps = list(map(bool, steps))
    for candidate in candidates:
        if list(map(bool, candidate)) == differing_steps:
            return candidate
    return list(steps)


def _find_largest(diffs: Sequence[TensorDiff]) -> float | None:
    """Return the largest difference; None if a difference has no number."""
    largest = 0.0
    for diff in diffs:
        if diff.max_abs is None:
            return None
        largest = max(largest, float(diff.max_abs))
    return largest


def suspects(tensors: Iterable[TensorDiff], group: Comparison) -> tuple[int, ...]:
    """Return the ranks outside the majority of the tensors. Without a majority, return all ranks with differences.

    If most of the tensors have no majority, a majority in a few of them does not count: for example, two ranks may
    agree on a bias that changes only by rounding.
    """
    # Running statistics differ between ranks without a fault, so they only count if no other tensor differs.
    diffs = list(tensors)
    diffs = exclude_kinds(diffs, *BN_STATISTICS) or diffs
    deviating = minorities_of(diffs)
    without_majority = [diff for diff in diffs if len(diff.clusters) > 1 and not diff.minority]
    are_most = 2 * len(without_majority) > len(diffs)
    if are_most or not deviating or len(deviating) >= len(group.replicas):
        deviating = holders_of(diffs)
    return tuple(sorted(deviating)) or group.ranks


def last_agreement(names: Collection[str], groups: Sequence[Comparison]) -> int | None:
    """Return the last step before the last group at which all these tensors were compared and agreed; None without."""
    for group in reversed(groups[:-1]):
        uncompared = with_status(group.tensors, "not_compared")
        unequal = list_names((*out_of_sync(group), *uncompared))
        are_present = group.evidence.names.keys() >= set(names)
        if are_present and set(unequal).isdisjoint(names):
            return group.step
    return None


def smaller_set(first: set[int], second: set[int]) -> set[int]:
    """Return the smaller set of ranks, which is suspect, or both sets if they are equally large."""
    if len(first) == len(second):
        return first | second
    return min(first, second, key=len)
