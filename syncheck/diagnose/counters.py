"""What the optimizer's step counters tell, for the rules about ranks that lost a step or a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.diagnose.case import counted, differ, number_text, parameter_of, ranks_by
from syncheck.kinds import BN_STATISTICS
from syncheck.messages import ranks_text
from syncheck.value_kinds import SCALES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, TensorDiff

# A lag of so many steps, or of less than this share of the larger count, is of steps that were left out; a state that
# was lost or not restored is further behind, unless the run is short.
FEW = 2
SHARE = 0.05
# A run in which a lag of a few steps may as well be a state that was lost at the start.
SHORT = 5


@dataclass(frozen=True, slots=True)
class StepCounter:
    """One of the optimizer's step counters that is not equal on all ranks.

    by_rank: what each rank counted. diff: None where the counter is a Python number. odd: the ranks outside the
    majority; empty where there is none.
    """

    name: str
    by_rank: Mapping[int, float]
    diff: TensorDiff | None
    odd: tuple[int, ...]

    @property
    def lag(self) -> float:
        """How many steps the ranks are apart."""
        return max(self.by_rank.values()) - min(self.by_rank.values())

    @property
    def far(self) -> bool:
        """Whether the ranks are further apart than by a few steps that were left out."""
        return self.lag > FEW and self.lag >= SHARE * max(self.by_rank.values())

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks that counted fewer steps than others."""
        most = max(self.by_rank.values())
        return tuple(sorted(rank for rank, count in self.by_rank.items() if count < most))


def counters_of(case: Case) -> tuple[StepCounter, ...]:
    """Return the uncovered step counters that differ and of which it is known what they count on each rank."""
    found = []
    for diff in case.of_kind("optimizer_step"):
        counts = counts_of(diff)
        if len(set(counts.values())) > 1:
            found.append(StepCounter(diff.name, counts, diff, diff.minority))
    for value in case.of_values():
        if value.kind != "counter":
            continue
        numbers = {rank: float(count) for rank, count in value.by_rank.items() if _is_number(count)}
        if len(numbers) == len(value.by_rank) and len(set(numbers.values())) > 1:
            found.append(StepCounter(value.name, numbers, None, minority_of(numbers)))
    return tuple(found)


def counts_of(diff: TensorDiff) -> dict[int, float]:
    """Return what a tensor of one element holds on each rank; empty where that is not known of all."""
    values = {} if diff.evidence is None else diff.evidence.values
    numbers = {rank: float(value) for rank, value in values.items() if _is_number(value)}
    return numbers if all(rank in numbers for ranks in diff.clusters for rank in ranks) else {}


def minority_of(by_rank: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most common one; empty where no value is the most common."""
    first, *others = sorted(ranks_by(by_rank).values(), key=len, reverse=True) or [[]]
    if not others or len(first) == len(others[0]):
        return ()
    return tuple(sorted(rank for ranks in others for rank in ranks))


def odd_ranks(counters: Iterable[StepCounter]) -> tuple[int, ...]:
    """Return the ranks outside the majority; without a majority those that counted fewer steps."""
    return tuple(sorted({rank for counter in counters for rank in counter.odd or counter.behind}))


def farthest(counters: Iterable[StepCounter]) -> StepCounter | None:
    """Return the counter in which the ranks are most steps apart."""
    return max(counters, key=lambda counter: counter.lag, default=None)


def names_of_values(counters: Iterable[StepCounter]) -> tuple[str, ...]:
    """Name the counters that are Python numbers, which a finding covers as values and not as tensors."""
    return tuple(counter.name for counter in counters if counter.diff is None)


def fitting(case: Case, *, far: bool) -> tuple[StepCounter, ...]:
    """Return the counters that tell of steps left out, or with `far` of a state that was lost.

    Counters alone that differ tell of neither: somebody set them. Nor where the ranks' loss scalers explain the lag, or
    where BatchNorm's counts lag as well: then the rank did not only miss the optimizer's work.
    """
    found = tuple(c for c in counters_of(case) if c.far is far)
    # A rank that holds the others' state of an earlier step to the byte has lost none.
    if not found or scaler_explains(case, found) or (far and (case.group.evidence.stale or forwards_lag(case, found))):
        return ()
    moved = [diff for diff in followers(case, found) if diff.kind in ("parameter", "optimizer")]
    return found if moved or not case.compared("parameter", "optimizer") else ()


def followers(case: Case, counters: Sequence[StepCounter]) -> tuple[TensorDiff, ...]:
    """Return the uncovered differences that follow from those of these counters, the counters among them.

    These are the parameters that they count for and the state of these, and, as activations and gradients then differ,
    running statistics, averages of the weights and the loss scaler. Where the names do not say which parameter a
    counter is of, or no counter is given: all parameters but the frozen ones.
    """
    own = {counter.name for counter in counters}
    clusters = {counter.diff.clusters for counter in counters if counter.diff is not None}
    # Of very many counters only the first are read.
    steps = [
        diff
        for diff in case.of_kind("optimizer_step")
        if not own or diff.name in own or (not counts_of(diff) and diff.clusters in clusters)
    ]
    names = {parameter_of(name) for name in (*own, *(diff.name for diff in steps))}
    known = bool(own) and all(case.group.evidence.names.get(name) == "parameter" for name in names)
    frozen, found = case.frozen, list(steps)
    loose = case.loose  # buffers follow the parameters: their inputs do
    for diff in case.tensors:
        if diff.kind == "parameter":
            taken = diff.name in names if known else diff.name not in frozen
            taken = taken or diff.name in loose
        elif diff.kind == "optimizer":
            taken = not known or parameter_of(diff.name) in names
        else:
            taken = diff.kind in ("ema", "scaler", "buffer") or (diff.kind in BN_STATISTICS and case.agrees("bn_count"))
        if taken:
            found.append(diff)
    if counters and forwards_lag(case, counters):
        found += case.of_kind("bn_count", *BN_STATISTICS)
    return tuple(found)


def forwards_lag(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether BatchNorm counted fewer batches on the ranks that counted fewer steps: they missed all of these steps.

    With gradient accumulation a step is several batches.
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
    """Return the loss scaler's scale by rank, where it differs and each rank's is known; else empty."""
    for value in group.values:
        if value.kind == "scaler" and value.name.rpartition(".")[2] in SCALES:
            numbers = {rank: float(scale) for rank, scale in value.by_rank.items() if _is_number(scale)}
            return numbers if len(numbers) == len(value.by_rank) else {}
    for diff in group.tensors:
        if diff.kind == "scaler" and diff.name.rpartition(".")[2] in SCALES:
            return counts_of(diff)
    return {}


def scaler_explains(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether loss scales differ so that steps were left out for overflows: each of them halves the scale.

    The ranks behind then have a lower scale; for more than a few steps one that is as many times halved.
    """
    scales = scales_of(case.group)
    if not scales or min(scales.values()) <= 0:
        return False
    halved = math.log2(max(scales.values()) / min(scales.values()))
    lowest = {rank for rank, scale in scales.items() if scale < max(scales.values())}
    return all(set(c.behind) <= lowest and (not c.far or c.lag <= halved) for c in counters)


def trackers(case: Case, ranks: Collection[int] = ()) -> tuple[str, ...]:
    """Return the uncovered values of the loss scaler that differ, for it counts steps as well.

    A scaler that some ranks lack is in no other state than theirs. ranks: only values in which no other is odd.
    """
    return tuple(
        value.name
        for value in case.of_values()
        if value.kind == "scaler"
        and len({str(found) for found in value.by_rank.values() if found is not None}) > 1
        and (not ranks or set(minority_of(value.by_rank)) <= set(ranks))
    )


def counted_text(counter: StepCounter) -> str:
    """Say what the ranks counted: '12 steps on ranks 0, 1, 2 and 11 on rank 3'."""
    first, *others = sorted(ranks_by(dict(sorted(counter.by_rank.items()))).items(), reverse=True)
    texts = [f"{number_text(first[0])} steps on {ranks_text(first[1])}"]
    texts += [f"{number_text(count)} on {ranks_text(ranks)}" for count, ranks in others[:3]]
    return " and ".join(texts) + (" and ..." if len(others) > 3 else "")


def lag_text(counters: Sequence[StepCounter]) -> str:
    """Say how many counters differ, by how much, and what the ranks of the one most apart counted; '' without any."""
    most = farthest(counters)
    if most is None:
        return ""
    number = counted(len(counters), "optimizer step counter")
    return f"{number} {differ(len(counters))}, by {counted(int(most.lag), 'step')}: {counted_text(most)}"


def other_lag_text(counter: StepCounter, series: Sequence[Comparison]) -> str:
    """Say how far this counter was apart at the first step of the run at which it was; '' where that is as far as now.

    'at step 10 it was 1 step'.
    """
    for group in series[:-1]:
        for diff in group.tensors:
            counts = counts_of(diff) if diff.name == counter.name else {}
            if counts and group.step is not None:
                lag = max(counts.values()) - min(counts.values())
                return "" if lag == counter.lag else f"at step {group.step} it was {counted(int(lag), 'step')}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
