"""Step counters of the optimizer: which ranks counted fewer steps, by how much, and since when."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from syncheck.diagnose.averaging import recorded_step
from syncheck.diagnose.optimizer_names import parameter_of
from syncheck.diagnose.rank_values import are_unequal, below_highest, counts_of, find_minority, known_numbers, spread
from syncheck.diagnose.selection import join_ranks, ranks_outside, select_names
from syncheck.messages import Message, Sentence
from syncheck.tensors.value_kinds import is_lbfgs_state

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, TensorDiff

# A lag of up to FEW steps, or of less than SHARE of the larger count, means skipped steps. A rank that lost its state
# lags further behind, except in a short run.
FEW = 2
SHARE = 0.05
# In a run of up to this many steps, state lost at the start also causes a lag of only a few steps.
SHORT = 5
# A rank may skip up to this many steps in a row, for example while its loss is NaN.
BURST = 10


class Origin(Sentence):
    """Statements about the step at which a difference began."""

    STALE = "at step {step} {ranks:ranks} {ranks:verb was|were} bitwise equal to the other ranks at step {earlier}"
    COUNTERS = (
        "{counters:count optimizer step counter} {counters:verb differs|differ}, by {lag:count step}: {steps:by_rank}"
    )


@dataclass(frozen=True, slots=True)
class StepCounter:
    """An optimizer step counter with different values on different ranks."""

    name: str
    by_rank: Mapping[int, float]
    """The count of each rank."""
    diff: TensorDiff | None
    """None if the counter is a Python number."""
    minority: tuple[int, ...]
    """The ranks outside the majority; empty without a majority."""

    @property
    def lag(self) -> float:
        """The largest difference between two ranks, in steps."""
        return spread(self.by_rank)

    @property
    def highest(self) -> float:
        """The largest count of a rank."""
        return max(self.by_rank.values())

    @property
    def far(self) -> bool:
        """Whether the lag is larger than a few skipped steps."""
        return self.lag > FEW and self.lag >= SHARE * self.highest

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks with a smaller count than another rank."""
        return below_highest(self.by_rank)


def counters_of(case: Case) -> tuple[StepCounter, ...]:
    """Return the uncovered step counters with different, known counts."""
    counters = []
    for diff in case.of_kind("optimizer_step"):
        counts = counts_of(diff)
        if are_unequal(counts.values()):
            counters.append(StepCounter(diff.name, counts, diff, diff.minority))
    for value in case.of_values("counter"):
        # LBFGS counts iterations within a step, and their number depends on the loss.
        if is_lbfgs_state(value.name):
            continue
        counts = known_numbers(value.by_rank, value.by_rank.keys())
        if are_unequal(counts.values()):
            counters.append(StepCounter(value.name, counts, None, find_minority(counts)))
    return tuple(counters)


def deviating_ranks(counters: Iterable[StepCounter]) -> tuple[int, ...]:
    """Return the ranks outside the majority, or without a majority the ranks with smaller counts."""
    return tuple(sorted(join_ranks(counter.minority or counter.behind for counter in counters)))


def healthy_count(case: Case, counter: StepCounter) -> float | None:
    """Return the number of steps that the healthy ranks counted; None if neither the step nor a majority shows it."""
    step = recorded_step(case.group)
    if step is not None:
        # Trainers that number the steps from 0 store a number below the count.
        possible = {step, step + 1}.intersection(counter.by_rank.values())
        if len(possible) == 1:
            return possible.pop()

    # The majority is healthy if all of its ranks counted the same steps.
    majority = ranks_outside(counter.by_rank, counter.minority)
    agreed = {counter.by_rank[rank] for rank in majority}
    if not counter.minority or len(agreed) > 1:
        return None
    return agreed.pop()


def are_partial(case: Case) -> bool:
    """Whether some step counters differ and others agree, so that a part of the optimizer took other steps."""
    return bool(case.of_kind("optimizer_step") and case.agreeing("optimizer_step"))


def is_whole_optimizer(case: Case, names: Collection[str]) -> bool:
    """Whether the parameters are all those of some of several optimizers, as in a GAN. names: of other steps."""
    sizes: Counter[str] = Counter()
    lagging: Counter[str] = Counter()
    for counter in case.names_of("optimizer_step"):
        optimizer = _optimizer_of(case, counter)
        sizes[optimizer] += 1
        if case.owner_of(counter) in names:
            lagging[optimizer] += 1
    # A single optimizer has no number, and a part of an optimizer lags for another reason.
    is_part_behind = any(lagging[optimizer] < sizes[optimizer] for optimizer in lagging)
    return len(sizes) > 1 and not is_part_behind


def is_optimizer_behind(case: Case) -> bool:
    """Whether all counters of some of several optimizers differ, and all counters of the rest agree."""
    return are_partial(case) and is_whole_optimizer(case, case.owners_of(case.of_kind("optimizer_step")))


def _optimizer_of(case: Case, counter: str) -> str:
    """Return the number of the optimizer of a step counter if there are several, else an empty text."""
    parameter = parameter_of(counter)
    if parameter in case.group.evidence.names:
        return ""
    number, _, remainder = parameter.partition(".")
    is_numbered = number.isdecimal() and bool(remainder)
    return number if is_numbered else ""


def farthest(counters: Iterable[StepCounter]) -> StepCounter | None:
    """Return the counter with the largest lag."""
    return max(counters, key=lambda counter: counter.lag, default=None)


def names_of_values(counters: Iterable[StepCounter]) -> tuple[str, ...]:
    """Return the names of counters stored as Python numbers; a finding covers them as values, not as tensors."""
    return tuple(counter.name for counter in counters if counter.diff is None)


def counter_facts(counters: Sequence[StepCounter]) -> tuple[Message, ...]:
    """State how many step counters differ, and the counts of the counter with the largest lag; empty without any."""
    largest = farthest(counters)
    if largest is None:
        return ()
    fact = Origin.COUNTERS(
        counters=len(counters),
        lag=int(largest.lag),
        steps=steps_by_rank(largest),
    )
    return (fact,)


def _earlier_counts(
    counter: StepCounter, series: Sequence[Comparison]
) -> Iterator[tuple[int | None, dict[int, float]]]:
    """Yield the step and the counts by rank at earlier steps at which the counter differed."""
    for group in series[:-1]:
        for diff in select_names(group.tensors, (counter.name,)):
            counts = counts_of(diff)
            if counts:
                yield group.step, counts


def steps_by_rank(counter: StepCounter) -> dict[int, int]:
    """Return the number of steps that each rank counted."""
    return {rank: int(count) for rank, count in sorted(counter.by_rank.items())}


def earlier_lag(counter: StepCounter, series: Sequence[Comparison]) -> tuple[int, int] | None:
    """Return the first step at which the counter differed and its lag there; None if the lag has not changed."""
    for step, counts in _earlier_counts(counter, series):
        if step is not None:
            lag = spread(counts)
            if lag == counter.lag:
                return None
            return (step, int(lag))
    return None


def lag_grew(counter: StepCounter, series: Sequence[Comparison]) -> bool:
    """Whether the counter lagged at an earlier step too, and by less: steps are skipped again and again."""
    earlier = earlier_lag(counter, series)
    return earlier is not None and earlier[1] < counter.lag


def lag_stayed(counter: StepCounter, series: Sequence[Comparison]) -> bool:
    """Whether the counter lagged by as much at an earlier step, so that the lag has a single cause."""
    for _, counts in _earlier_counts(counter, series):
        if spread(counts) == counter.lag:
            return max(counts.values()) < counter.highest
    return False


def may_be_old(case: Case) -> bool:
    """Whether nothing shows that the files are of the same step.

    They are if they store their step. With checkpoints of several steps, an older file of a rank is a stale rank.
    """
    if case.group.evidence.stores_progress or case.in_memory:
        return False
    # With checkpoints of several steps, an older file of a rank is a stale rank.
    return len(case.steps()) == 1
