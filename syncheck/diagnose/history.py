"""Follow the tensors of a finding over the steps of a run, and identify the ranks that cause their differences."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import median
from syncheck.diagnose.selection import (
    exclude_kinds,
    exclude_names,
    holders_of,
    list_names,
    minorities_of,
    out_of_sync,
    select_counting,
    select_kinds,
    select_names,
    size_of,
    with_status,
)
from syncheck.records import History, HistoryPoint
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from syncheck.records import Comparison, TensorDiff, Trend

# Counters show when the ranks began to differ, but not how much the model differs.
_COUNTERS = ("bn_count", "optimizer_step")
# Which tensors of a finding show its history: the first kind that it has. Other kinds come second.
_OTHER_KINDS = 1
_FOLLOWED = {
    **dict.fromkeys(("parameter", *OPTIMIZER), 0),
    **dict.fromkeys(BN_STATISTICS, 2),
    # An averaged copy differs longer than the model, and later.
    "ema": 3,
}

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
            differing = select_names(out_of_sync(group), followed)
            steps.append(_Step(group.step, group, differing))
    differing_by_step = [step.differing for step in steps]
    first = count_agreeing(differing_by_step)
    # A single step has no history.
    if len(steps) < 2 or first == len(steps):
        return None

    measured_by_step = _select_measured(differing_by_step)
    points = []
    for step, measured in zip(steps, measured_by_step, strict=True):
        point = HistoryPoint(
            step=step.number,
            differing=len(step.differing),
            max_abs=_find_largest(measured),
            others_differ=_have_others(followed, step.group),
        )
        points.append(point)
    begin = steps[first]
    first_names = list_names((*measured_by_step[first], *begin.differing))
    return History(
        points=tuple(points),
        since=begin.number,
        agreed=steps[first - 1].number if first else None,
        tensors=tuple(dict.fromkeys(first_names)),
        ranks=suspects(begin.differing, begin.group),
        trend=trend_of(measured_by_step[first:]),
    )


def _select_followed(names: Collection[str], groups: Sequence[Comparison]) -> Collection[str]:
    """Return the names whose differences are followed: all names of the first kinds in the order of `_FOLLOWED`."""
    kinds: dict[str, str] = {}
    for group in groups:
        kinds.update((diff.name, diff.kind) for diff in group.tensors)
    names_by_order: dict[int, set[str]] = defaultdict(set)
    for name in names:
        order = _FOLLOWED.get(kinds.get(name, ""), _OTHER_KINDS)
        names_by_order[order].add(name)
    first_order = min(names_by_order, default=_OTHER_KINDS)
    return names_by_order[first_order]


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
    if is_uniform:
        if abs(middle - 1) <= CONSTANT:
            return "constant"
        if middle < 1:
            return "shrinking"
    return "growing" if middle >= GROWING else "varying"


def difference_ratios(before: Iterable[TensorDiff], after: Iterable[TensorDiff]) -> list[float]:
    """Return the ratio of the later to the earlier difference for each tensor with both."""
    earlier_sizes = {diff.name: float(size_of(diff)) for diff in before}
    ratios = []
    for diff in after:
        earlier_size = earlier_sizes.get(diff.name, 0.0)
        later_size = float(size_of(diff))
        # A tensor that agrees at one of the steps has no ratio.
        if min(earlier_size, later_size) > 0:
            ratios.append(later_size / earlier_size)
    return ratios


def _have_others(names: Collection[str], group: Comparison) -> bool:
    """Whether other tensors, or any values, are out of sync at a step."""
    other_tensors = exclude_names(out_of_sync(group), names)
    other_differences = [*other_tensors, *select_counting(group.values)]
    return bool(other_differences)


def _select_measured(steps: Sequence[list[TensorDiff]]) -> list[list[TensorDiff]]:
    """Return the diffs of each step whose size is followed: the same kinds of tensors at all steps with differences.

    Returns the parameters, or else all tensors except statistics and counters, or else all tensors except counters.
    Statistics depend on the batch of each step even if the difference of the weights is constant.
    """
    steps = list(steps)
    for select in (_select_parameters, _exclude_statistics, _exclude_counters):
        selected = [select(differing) for differing in steps]
        # The size is unknown at a step with other differences only.
        if selected.count([]) == steps.count([]):
            return selected
    return steps


def _select_parameters(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return the parameters."""
    return select_kinds(diffs, "parameter")


def _exclude_statistics(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return all tensors except running statistics and counters."""
    return exclude_kinds(diffs, *BN_STATISTICS, *_COUNTERS)


def _exclude_counters(diffs: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Return all tensors except counters."""
    return exclude_kinds(diffs, *_COUNTERS)


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
    diffs = list(tensors)
    without_statistics = exclude_kinds(diffs, *BN_STATISTICS)
    # Running statistics differ between ranks without a fault, so they only count if no other tensor differs.
    counting = without_statistics or diffs
    deviating = minorities_of(counting)
    # At least one rank deviates, and at least one rank never does.
    are_some_healthy = 0 < len(deviating) < len(group.replicas)
    if not are_some_healthy or _lack_majority(counting):
        deviating = holders_of(counting)
    return tuple(sorted(deviating)) or group.ranks


def _lack_majority(diffs: Sequence[TensorDiff]) -> bool:
    """Whether no majority of the ranks agrees in most of the tensors."""
    without_majority = []
    for diff in diffs:
        # Only one rank may hold a tensor, which then has a single set without a minority.
        differs_between_ranks = len(diff.clusters) > 1
        if differs_between_ranks and not diff.minority:
            without_majority.append(diff)
    return 2 * len(without_majority) > len(diffs)


def last_agreement(names: Collection[str], groups: Sequence[Comparison]) -> int | None:
    """Return the last step before the last group at which all these tensors were compared and agreed; None without."""
    expected_names = set(names)
    earlier_groups = groups[:-1]
    for group in reversed(earlier_groups):
        uncompared = with_status(group.tensors, "not_compared")
        unequal = list_names((*out_of_sync(group), *uncompared))
        agreeing_names = group.evidence.names.keys() - unequal
        if agreeing_names >= expected_names:
            return group.step
    return None


def smaller_set(first: set[int], second: set[int]) -> set[int]:
    """Return the smaller set of ranks, which is suspect, or both sets if they are equally large."""
    if len(first) == len(second):
        return first | second
    return min(first, second, key=len)
