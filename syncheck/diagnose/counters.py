"""Evidence on the progress of each rank: step counters of the optimizer, stale ranks and lost optimizer state."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from syncheck.diagnose.case import evidence_of, parameter_of
from syncheck.messages import Message, Sentence
from syncheck.records import largest_first, minority_of
from syncheck.tensors.kinds import BN_STATISTICS, OPTIMIZER
from syncheck.tensors.value_kinds import SCALES, is_lbfgs_state
from syncheck.text import group_ranks

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
        return below_highest(self.by_rank)


def counters_of(case: Case) -> tuple[StepCounter, ...]:
    """Return the uncovered step counters with different, known counts."""
    counters = []
    for diff in case.of_kind("optimizer_step"):
        counts = counts_of(diff)
        if len(set(counts.values())) > 1:
            counters.append(StepCounter(diff.name, counts, diff, diff.minority))
    for value in case.of_values():
        # LBFGS counts iterations within a step, and their number depends on the loss.
        is_counter = value.kind == "counter" and not is_lbfgs_state(value.name)
        numbers = _known_numbers(value.by_rank, value.by_rank) if is_counter else {}
        if len(set(numbers.values())) > 1:
            counters.append(StepCounter(value.name, numbers, None, find_minority(numbers)))
    return tuple(counters)


def counts_of(diff: TensorDiff) -> dict[int, float]:
    """Return the value of a single-element tensor by rank; empty unless all values are known."""
    return _known_numbers(evidence_of(diff).values, chain(*diff.clusters))


def find_minority(by_rank: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value is not the most common value; empty if there is a tie."""
    return minority_of(largest_first(group_ranks(by_rank).values()))


def below_highest(by_rank: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks with a smaller number than another rank."""
    return tuple(sorted(rank for rank, number in by_rank.items() if number < max(by_rank.values())))


def odd_ranks(counters: Iterable[StepCounter]) -> tuple[int, ...]:
    """Return the ranks outside the majority, or without a majority the ranks with smaller counts."""
    return tuple(sorted({rank for counter in counters for rank in counter.odd or counter.behind}))


def healthy_count(case: Case, counter: StepCounter) -> float | None:
    """Return the number of steps that the healthy ranks counted; None if neither the step nor a majority shows it.

    Trainers that number the steps from 0 store a number below the count.
    """
    counts, metadata = set(counter.by_rank.values()), case.group.evidence.metadata
    step = case.group.step if metadata.step is None else metadata.step
    if step is not None:
        possible = counts & {step, step + 1}
        if len(possible) == 1:
            return possible.pop()
    agreed = {count for rank, count in counter.by_rank.items() if rank not in counter.odd}
    return agreed.pop() if counter.odd and len(agreed) == 1 else None


def are_partial(case: Case) -> bool:
    """Whether some step counters differ and others agree, so that a part of the optimizer took other steps."""
    return any(diff.kind == "optimizer_step" for diff in case.tensors) and bool(case.agreeing("optimizer_step"))


def is_whole_optimizer(case: Case, names: Collection[str]) -> bool:
    """Whether the parameters are all those of some of several optimizers, as in a GAN. names: of other steps."""
    sizes: Counter[str] = Counter()
    lagging: Counter[str] = Counter()
    for counter in case.names_of("optimizer_step"):
        optimizer = _optimizer_of(case, counter)
        sizes[optimizer] += 1
        lagging[optimizer] += case.owner_of(counter) in names
    return len(sizes) > 1 and all(count in (0, sizes[optimizer]) for optimizer, count in lagging.items())


def is_optimizer_behind(case: Case) -> bool:
    """Whether all counters of some of several optimizers differ, and all counters of the rest agree."""
    names = frozenset(case.owner_of(diff.name) for diff in case.of_kind("optimizer_step"))
    return bool(names and case.agreeing("optimizer_step")) and is_whole_optimizer(case, names)


def _optimizer_of(case: Case, counter: str) -> str:
    """Return the number of the optimizer of a step counter if there are several, else an empty text."""
    parameter = parameter_of(counter)
    head, _, remainder = parameter.partition(".")
    is_number = head.isdecimal() and bool(remainder) and parameter not in case.group.evidence.names
    return head if is_number else ""


def parameters_agree(case: Case) -> bool:
    """Whether parameters were compared, and all of them are equal: no rank took another step so far."""
    return bool(case.compared("parameter")) and case.agrees("parameter")


def farthest(counters: Iterable[StepCounter]) -> StepCounter | None:
    """Return the counter with the largest lag."""
    return max(counters, key=lambda counter: counter.lag, default=None)


def names_of_values(counters: Iterable[StepCounter]) -> tuple[str, ...]:
    """Return the names of counters stored as Python numbers; a finding covers them as values, not as tensors."""
    return tuple(counter.name for counter in counters if counter.diff is None)


def fitting(case: Case, *, far: bool) -> tuple[StepCounter, ...]:
    """Return the counters whose lag means skipped steps or, with `far`, lost optimizer state.

    Empty if nothing else differs (somebody set the counters), if the loss scalers explain the lag, or with `far` if
    BatchNorm's counts lag too, because the rank then missed more than the optimizer step. A lag that grew since an
    earlier step means skipped steps, however large it is.
    """
    counters = counters_of(case)
    most = farthest(counters)
    if most is not None and lag_grew(most, case.series):
        counters = () if far else counters
    else:
        # A rank skips a few steps of an optimizer, as in a GAN, more often than it loses the state of only one of them.
        is_skipped = is_optimizer_behind(case) and most is not None and most.lag <= BURST
        counters = tuple(counter for counter in counters if (counter.far and not is_skipped) is far)
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
            return _known_numbers(value.by_rank, value.by_rank)
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
    return all({*c.behind} <= {*below_highest(scales)} and (not c.far or c.lag <= halved) for c in counters)


def trackers(case: Case, ranks: Collection[int] = ()) -> tuple[str, ...]:
    """Return the names of differing, uncovered loss scaler values, because the scaler counts steps too.

    A missing value does not differ. ranks: return only values with a minority within this set of ranks.
    """
    return tuple(
        value.name
        for value in case.of_values()
        if value.kind == "scaler"
        and len({str(held) for held in value.by_rank.values() if held is not None}) > 1
        and (not ranks or set(find_minority(value.by_rank)) <= set(ranks))
    )


def stale_at_first(case: Case) -> Comparison | None:
    """Return the first group since which parameters have differed at every step, if ranks were stale in it.

    Without a series this is the group of the case. A difference from before a step in sync has another cause.
    """
    first = None
    for group in reversed(case.series):
        if not any(diff.kind == "parameter" and diff.out_of_sync for diff in group.tensors):
            break
        first = group
    return first if first is not None and first.evidence.stale else None


def ran_forward(group: Comparison) -> bool | None:
    """Whether stale ranks ran the forward pass, by BatchNorm's counts. None without BatchNorm."""
    if not sum(counts.compared for kind, counts in group.kinds.items() if kind == "bn_count"):
        return None
    return not any(diff.kind == "bn_count" and diff.out_of_sync for diff in group.tensors)


def only_skipped(group: Comparison) -> bool:
    """Whether stale ranks ran the forward pass and skipped the optimizer step: parameters and state are old.

    After an early parameter gather the parameters are old and the optimizer state is new. If loss scales differ, an
    overflow caused the skipped step, which is SYN216.
    """
    old_state = any(diff.kind in OPTIMIZER and diff.out_of_sync for diff in group.tensors)
    return bool(group.evidence.stale) and old_state and ran_forward(group) is True and not scales_of(group)


def stale_facts(group: Comparison) -> tuple[Message, ...]:
    """State which ranks were bitwise equal to the other ranks at which earlier step."""
    ranks_of = group_ranks(dict(sorted(group.evidence.stale.items())))
    return tuple(
        Origin.STALE(step=group.step, ranks=tuple(ranks), earlier=earlier) for earlier, ranks in ranks_of.items()
    )


def counter_facts(counters: Sequence[StepCounter]) -> tuple[Message, ...]:
    """State how many step counters differ, and the counts of the counter with the largest lag; empty without any."""
    most = farthest(counters)
    if most is None:
        return ()
    return (Origin.COUNTERS(counters=len(counters), lag=int(most.lag), steps=steps_by_rank(most)),)


def steps_by_rank(counter: StepCounter) -> dict[int, int]:
    """Return the number of steps that each rank counted."""
    return {rank: int(count) for rank, count in sorted(counter.by_rank.items())}


def earlier_lag(counter: StepCounter, series: Sequence[Comparison]) -> tuple[int, int] | None:
    """Return the first step at which the counter differed and its lag there; None if the lag has not changed."""
    for group in series[:-1]:
        for diff in group.tensors:
            counts = counts_of(diff) if diff.name == counter.name else {}
            if counts and group.step is not None:
                lag = max(counts.values()) - min(counts.values())
                return None if lag == counter.lag else (group.step, int(lag))
    return None


def lag_grew(counter: StepCounter, series: Sequence[Comparison]) -> bool:
    """Whether the counter lagged at an earlier step too, and by less: steps are skipped again and again."""
    earlier = earlier_lag(counter, series)
    return earlier is not None and earlier[1] < counter.lag


def lag_stayed(counter: StepCounter, series: Sequence[Comparison]) -> bool:
    """Whether the counter lagged by as much at an earlier step, so that the lag has a single cause."""
    for group in series[:-1]:
        for diff in group.tensors:
            counts = counts_of(diff) if diff.name == counter.name else {}
            if counts and max(counts.values()) - min(counts.values()) == counter.lag:
                return max(counts.values()) < max(counter.by_rank.values())
    return False


def may_be_old(case: Case) -> bool:
    """Whether nothing shows that the files are of the same step.

    They are if they store their step. With checkpoints of several steps, an older file of a rank is a stale rank.
    """
    return not case.group.evidence.stores_progress and not case.in_memory and len(case.steps()) == 1


def without_state(case: Case) -> tuple[int, ...]:
    """Return the ranks whose optimizer has parameter groups but no state, although other ranks have both.

    Empty if the optimizer itself is missing, as in files of the model only, or if each rank holds a part of the state.
    """
    group = case.group
    # Look at all missing tensors, because an earlier rule may cover some of them, for example for NaNs beside them.
    missing = [diff for diff in group.tensors if diff.reason == "missing" and diff.kind in OPTIMIZER]
    if not missing or not group.evidence.hyperparameters or group.evidence.metadata.optimizer_sharded:
        return ()
    if len(missing) < sum(kind in OPTIMIZER for kind in group.evidence.names.values()):
        return ()
    holders = {frozenset(rank for ranks in diff.clusters for rank in ranks) for diff in missing}
    without = tuple(rank for rank in group.ranks if not any(rank in ranks for ranks in holders))
    if len(holders) != 1 or not without:
        return ()
    # A rank without parameter groups has no optimizer in its file.
    no_groups = any(rank in value.lost for value in group.values if ".param_groups." in value.name for rank in without)
    return () if no_groups else without


def _known_numbers(by_rank: Mapping[int, object], ranks: Iterable[int]) -> dict[int, float]:
    """Return the finite numbers by rank; empty if a rank has no number."""
    numbers = {
        rank: float(value)
        for rank, value in by_rank.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
    return numbers if numbers.keys() >= set(ranks) else {}
