"""The optimizer's step counters, for rules about ranks that skipped a step or lost optimizer state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.diagnose.case import parameter_of, ranks_by
from syncheck.kinds import BN_STATISTICS
from syncheck.value_kinds import SCALES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, TensorDiff

# A lag of up to FEW steps, or of less than SHARE of the larger count, means skipped steps. A rank that lost its state
# lags further behind, except in a short run.
FEW = 2
SHARE = 0.05
# In a run of up to this many steps, state lost at the start also causes a lag of only a few steps.
SHORT = 5


@dataclass(frozen=True, slots=True)
class StepCounter:
    """An optimizer step counter with different values on different ranks.

    by_rank: the count of each rank. diff: None if the counter is a Python number. odd: the ranks outside the majority;
    empty without a majority.
    """

    name: str
    by_rank: Mapping[int, float]
    diff: TensorDiff | None
    odd: tuple[int, ...]

    @property
    def lag(self) -> float:
        """The largest difference between two ranks, in steps."""
        return max(self.by_rank.values()) - min(self.by_rank.values())

    @property
    def far(self) -> bool:
        """Whether the lag is larger than a few skipped steps."""
        return self.lag > FEW and self.lag >= SHARE * max(self.by_rank.values())

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks with a smaller count than another rank."""
        most = max(self.by_rank.values())
        return tuple(sorted(rank for rank, count in self.by_rank.items() if count < most))


def counters_of(case: Case) -> tuple[StepCounter, ...]:
    """Return the uncovered step counters with different, known counts."""
    counters = []
    for diff in case.of_kind("optimizer_step"):
        counts = counts_of(diff)
        if len(set(counts.values())) > 1:
            counters.append(StepCounter(diff.name, counts, diff, diff.minority))
    for value in case.of_values():
        if value.kind != "counter":
            continue
        numbers = {rank: float(count) for rank, count in value.by_rank.items() if _is_number(count)}
        if len(numbers) == len(value.by_rank) and len(set(numbers.values())) > 1:
            counters.append(StepCounter(value.name, numbers, None, minority_of(numbers)))
    return tuple(counters)


def counts_of(diff: TensorDiff) -> dict[int, float]:
    """Return the value of a single-element tensor by rank; empty unless all values are known."""
    values = {} if diff.evidence is None else diff.evidence.values
    numbers = {rank: float(value) for rank, value in values.items() if _is_number(value)}
    return numbers if all(rank in numbers for ranks in diff.clusters for rank in ranks) else {}


def minority_of(by_rank: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most common value; empty if there is a tie."""
    first, *others = sorted(ranks_by(by_rank).values(), key=len, reverse=True) or [[]]
    if not others or len(first) == len(others[0]):
        return ()
    return tuple(sorted(rank for ranks in others for rank in ranks))


def odd_ranks(counters: Iterable[StepCounter]) -> tuple[int, ...]:
    """Return the ranks outside the majority, or without a majority the ranks with smaller counts."""
    return tuple(sorted({rank for counter in counters for rank in counter.odd or counter.behind}))


def farthest(counters: Iterable[StepCounter]) -> StepCounter | None:
    """Return the counter with the largest lag."""
    return max(counters, key=lambda counter: counter.lag, default=None)


def names_of_values(counters: Iterable[StepCounter]) -> tuple[str, ...]:
    """Return the names of counters stored as Python numbers; a finding covers them as values, not as tensors."""
    return tuple(counter.name for counter in counters if counter.diff is None)


def fitting(case: Case, *, far: bool) -> tuple[StepCounter, ...]:
    """Return the counters whose lag means skipped steps or, with `far`, lost optimizer state.

    Empty if nothing else differs (somebody set the counters), if the loss scalers explain the lag, or with `far` if
    BatchNorm's counts lag too, because the rank then missed more than the optimizer step.
    """
    counters = tuple(counter for counter in counters_of(case) if counter.far is far)
    if not counters or scaler_explains(case, counters):
        return ()
    # A stale rank holds the other ranks' state of an earlier step, so it has not lost its state.
    if far and (case.group.evidence.stale or forwards_lag(case, counters)):
        return ()
    updated = [diff for diff in followers(case, counters) if diff.kind in ("parameter", "optimizer")]
    return counters if updated or not case.compared("parameter", "optimizer") else ()


def followers(case: Case, counters: Sequence[StepCounter]) -> tuple[TensorDiff, ...]:
    """Return the counters and the uncovered differences caused by the same event.

    The parameters of the counters and their optimizer state differ. Activations and gradients then differ too, so
    running statistics, averaged weights and the loss scaler follow. If no counter is given, or the parameter of a
    counter is unknown, all parameters follow except frozen parameters.
    """
    own = {counter.name for counter in counters}
    clusters = {counter.diff.clusters for counter in counters if counter.diff is not None}
    # Only the first of very many counters are read, so unread counters with the same clusters count too.
    steps = [
        diff
        for diff in case.of_kind("optimizer_step")
        if not own or diff.name in own or (not counts_of(diff) and diff.clusters in clusters)
    ]
    names = {parameter_of(name) for name in (*own, *(diff.name for diff in steps))}
    known = bool(own) and all(case.group.evidence.names.get(name) == "parameter" for name in names)
    frozen, result = case.frozen, list(steps)
    loose = case.loose  # buffers follow because their inputs differ
    for diff in case.tensors:
        if diff.kind == "parameter":
            follows = (diff.name in names if known else diff.name not in frozen) or diff.name in loose
        elif diff.kind == "optimizer":
            follows = not known or parameter_of(diff.name) in names
        else:
            follows = diff.kind in ("ema", "scaler", "buffer")
            follows = follows or (diff.kind in BN_STATISTICS and case.agrees("bn_count"))
        if follows:
            result.append(diff)
    if counters and forwards_lag(case, counters):
        result += case.of_kind("bn_count", *BN_STATISTICS)
    return tuple(result)


def forwards_lag(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether BatchNorm's counts lag on the same ranks as the step counters, so the ranks missed whole steps.

    With gradient accumulation, a step has several batches.
    """
    counts = case.of_kind("bn_count")
    known = [batches for diff in counts if (batches := counts_of(diff))]
    if not known or len(known) < len(counts):
        return False
    return all(_lags_alike(counter.by_rank, batches) for counter in counters for batches in known)


def _lags_alike(steps: Mapping[int, float], batches: Mapping[int, float]) -> bool:
    if steps.keys() != batches.keys():
        return False
    most, all_batches = max(steps.values()), max(batches.values())
    ratios = {(all_batches - batches[rank]) / (most - steps[rank]) for rank in steps if steps[rank] < most}
    level = all(batches[rank] == all_batches for rank in steps if steps[rank] == most)
    return level and len(ratios) == 1 and all(ratio >= 1 and ratio.is_integer() for ratio in ratios)


def scales_of(group: Comparison) -> dict[int, float]:
    """Return the loss scale by rank; empty unless it differs and is known on every rank."""
    for value in group.values:
        if value.kind == "scaler" and value.name.rpartition(".")[2] in SCALES:
            numbers = {rank: float(scale) for rank, scale in value.by_rank.items() if _is_number(scale)}
            return numbers if len(numbers) == len(value.by_rank) else {}
    for diff in group.tensors:
        if diff.kind == "scaler" and diff.name.rpartition(".")[2] in SCALES:
            return counts_of(diff)
    return {}


def scaler_explains(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether overflows explain the lag: each overflow skips a step and halves the loss scale.

    The lagging ranks must have a lower scale; for a large lag, it must have been halved at least as often.
    """
    scales = scales_of(case.group)
    if not scales or min(scales.values()) <= 0:
        return False
    halved = math.log2(max(scales.values()) / min(scales.values()))
    lowest = {rank for rank, scale in scales.items() if scale < max(scales.values())}
    return all(set(c.behind) <= lowest and (not c.far or c.lag <= halved) for c in counters)


def trackers(case: Case, ranks: Collection[int] = ()) -> tuple[str, ...]:
    """Return the names of differing, uncovered loss scaler values, because the scaler counts steps too.

    A missing value does not differ. ranks: return only values with a minority within this set of ranks.
    """
    return tuple(
        value.name
        for value in case.of_values()
        if value.kind == "scaler"
        and len({str(held) for held in value.by_rank.values() if held is not None}) > 1
        and (not ranks or set(minority_of(value.by_rank)) <= set(ranks))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
