"""Step counters of the optimizer: which ranks counted fewer steps, by how much, and since when."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.averaging import recorded_step
from syncheck.diagnose.optimizer_names import parameter_of, split_number
from syncheck.diagnose.rank_values import are_unequal, below_highest, counts_of, find_minority, known_numbers, spread
from syncheck.diagnose.selection import ranks_outside, select_names
from syncheck.frozen import record
from syncheck.messages import Message, Sentence
from syncheck.tensors.value_kinds import is_lbfgs_state

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
# A rank may skip up to this many steps in a row, for example while its loss is NaN.
BURST = 10


class Origin(Sentence):
    """Statements about the step at which a difference began."""

    STALE = "at step {step} {ranks:ranks} {ranks:verb was|were} bitwise equal to the other ranks at step {earlier}"
    COUNTERS = (
        "{counters:count optimizer step counter} {counters:verb differs|differ}, by {lag:count step}: {steps:by_rank}"
    )


@record
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
        least_share = SHARE * self.highest
        return self.lag > FEW and self.lag >= least_share

    @property
    def behind(self) -> tuple[int, ...]:
        """The ranks with a smaller count than another rank."""
        return below_highest(self.by_rank)


def counters_of(case: Case) -> tuple[StepCounter, ...]:
    """Return the uncovered step counters with different, known counts."""
    counters = []
    for diff in case.of_kind("optimizer_step"):
        counter = StepCounter(
            name=diff.name,
            by_rank=counts_of(diff),
            diff=diff,
            minority=diff.minority,
        )
        counters.append(counter)
    for value in case.of_values("counter"):
        # LBFGS counts iterations within a step, and their number depends on the loss.
        if is_lbfgs_state(value.name):
            continue
        counts = known_numbers(value.by_rank, value.by_rank.keys())
        counter = StepCounter(
            name=value.name,
            by_rank=counts,
            diff=None,
            minority=find_minority(counts),
        )
        counters.append(counter)
    return tuple(counter for counter in counters if are_unequal(counter.by_rank.values()))


def deviating_ranks(counters: Iterable[StepCounter]) -> tuple[int, ...]:
    """Return the ranks outside the majority, or without a majority the ranks with smaller counts."""
    deviating: set[int] = set()
    for counter in counters:
        deviating.update(counter.minority or counter.behind)
    return tuple(sorted(deviating))


def healthy_count(case: Case, counter: StepCounter) -> float | None:
    """Return the number of steps that the healthy ranks counted; None if neither the step nor a majority shows it."""
    step = recorded_step(case.group)
    if step is not None:
        # Trainers that number the steps from 0 store a number below the count.
        possible = {step, step + 1}.intersection(counter.by_rank.values())
        if len(possible) == 1:
            return possible.pop()

    majority = ranks_outside(counter.by_rank, counter.minority)
    counts = {counter.by_rank[rank] for rank in majority}
    # The majority is healthy if all of its ranks counted the same steps.
    is_agreed = len(counts) == 1
    return counts.pop() if counter.minority and is_agreed else None


def are_partial(case: Case) -> bool:
    """Whether some step counters differ and others agree, so that a part of the optimizer took other steps."""
    differing = case.of_kind("optimizer_step")
    agreeing = case.agreeing("optimizer_step")
    return bool(differing and agreeing)


def is_whole_optimizer(case: Case, names: Collection[str]) -> bool:
    """Whether the parameters are all those of some of several optimizers, as in a GAN. names: of other steps."""
    optimizers_behind = set()
    optimizers_in_step = set()
    for counter in case.names_of("optimizer_step"):
        optimizer = _optimizer_of(case, counter)
        if case.owner_of(counter) in names:
            optimizers_behind.add(optimizer)
        else:
            optimizers_in_step.add(optimizer)
    # A part of an optimizer lags for another reason.
    are_whole = optimizers_behind.isdisjoint(optimizers_in_step)
    # A single optimizer has no number.
    are_several = len(optimizers_behind | optimizers_in_step) > 1
    return are_several and are_whole


def is_optimizer_behind(case: Case) -> bool:
    """Whether all counters of some of several optimizers differ, and all counters of the rest agree."""
    differing = case.of_kind("optimizer_step")
    lagging_owners = case.owners_of(differing)
    return are_partial(case) and is_whole_optimizer(case, lagging_owners)


def _optimizer_of(case: Case, counter: str) -> str:
    """Return the number of the optimizer of a step counter if there are several, else an empty text."""
    parameter = parameter_of(counter)
    if parameter in case.group.evidence.names:
        return ""
    number, _ = split_number(parameter)
    return number


def farthest(counters: Iterable[StepCounter]) -> StepCounter | None:
    """Return the counter with the largest lag."""
    return max(counters, key=attrgetter("lag"), default=None)


def names_of_values(counters: Iterable[StepCounter]) -> tuple[str, ...]:
    """Return the names of counters stored as Python numbers; a finding covers them as values, not as tensors."""
    names = []
    for counter in counters:
        is_tensor = counter.diff is not None
        if not is_tensor:
            names.append(counter.name)
    return tuple(names)


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


class _EarlierLag(NamedTuple):
    """How a counter differed at an earlier step."""

    step: int | None
    lag: float
    highest: float
    """The largest count of a rank."""


def _earlier_lags(counter: StepCounter, series: Sequence[Comparison]) -> list[_EarlierLag]:
    """Return how the counter differed at the earlier steps at which its counts are known."""
    lags = []
    for group in series[:-1]:
        for diff in select_names(group.tensors, (counter.name,)):
            counts = counts_of(diff)
            if counts:
                earlier = _EarlierLag(
                    step=group.step,
                    lag=spread(counts),
                    highest=max(counts.values()),
                )
                lags.append(earlier)
    return lags


def steps_by_rank(counter: StepCounter) -> dict[int, int]:
    """Return the number of steps that each rank counted."""
    steps = {}
    for rank in sorted(counter.by_rank):
        count = counter.by_rank[rank]
        # All numbers of ranks are read as floats.
        steps[rank] = int(count)
    return steps


def earlier_lag(counter: StepCounter, series: Sequence[Comparison]) -> tuple[int, int] | None:
    """Return the first step at which the counter differed and its lag there; None if the lag has not changed."""
    for earlier in _earlier_lags(counter, series):
        if earlier.step is not None:
            has_changed = earlier.lag != counter.lag
            return (earlier.step, int(earlier.lag)) if has_changed else None
    return None


def lag_grew(counter: StepCounter, series: Sequence[Comparison]) -> bool:
    """Whether the counter lagged at an earlier step too, and by less: steps are skipped again and again."""
    earlier = earlier_lag(counter, series)
    if earlier is None:
        return False
    _, lag = earlier
    return lag < counter.lag


def lag_stayed(counter: StepCounter, series: Sequence[Comparison]) -> bool:
    """Whether the counter lagged by as much at an earlier step, so that the lag has a single cause."""
    for earlier in _earlier_lags(counter, series):
        if earlier.lag == counter.lag:
            # The ranks went on counting since.
            return earlier.highest < counter.highest
    return False


def may_be_old(case: Case) -> bool:
    """Whether nothing shows that the files are of the same step.

    They are if they store their step. With checkpoints of several steps, an older file of a rank is a stale rank.
    """
    exceptions = (
        case.group.evidence.stores_progress,
        case.in_running_job,
        # With checkpoints of several steps, an older file of a rank is a stale rank.
        len(case.steps()) != 1,
    )
    return not any(exceptions)
