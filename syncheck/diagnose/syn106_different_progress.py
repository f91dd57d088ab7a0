"""The checkpoints are from different moments of the run.

Signature: a step or epoch counter of the checkpoint differs between ranks. Or the files record the same step, but
BatchNorm's counts and all step counters of the optimizer lag on the same ranks, by more than a step or two. Or no step
is stored, all step counters of the optimizer differ, and neither a skipped step (SYN214) nor unrestored state (SYN215)
explains them. Between two models, such counters are enough, also beside an equal step if all parameters agree. A
recorded epoch, or a recorded step more than ten steps behind, proves another moment. A rank that skips a step before it
counts the step records a smaller step too, in a file of the same moment. If the recorded step lags by ten steps or less
and no epoch differs, or if the lag grew since an earlier step, the finding is therefore "consistent", beside SYN214. So
is a finding by counters alone. Tensors changed by training may differ between ranks of different progress. Frozen
parameters, weight decay, and differences between ranks of the same step have another cause.

Cause: a rank did not save at the last step, an older file remained in the folder, the ranks resumed from checkpoints of
different steps, or one rank stopped earlier than the other ranks.

Fix: compare files of one step. If all files are from the last save, make all ranks agree on the step before they save
or resume: all-reduce the MIN and MAX of the step, and stop if they differ.

Incidents: mosaicml/composer#2146 (ranks resumed from different checkpoints), hiyouga/LLaMA-Factory#655,
huggingface/transformers#28270; Megatron-LM warns and takes the larger step.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.counters import BURST, counters_of, deviating_ranks, farthest, names_of_values
from syncheck.diagnose.history import suspects
from syncheck.diagnose.loss_scales import scaler_explains
from syncheck.diagnose.optimizer_names import is_setting
from syncheck.diagnose.rank_values import are_unequal, find_minority
from syncheck.diagnose.selection import exclude_names
from syncheck.diagnose.skipped_steps import counters_of_lost_state, counters_of_skipped_steps, forwards_lag
from syncheck.messages import Message, Sentence
from syncheck.text import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.diagnose.counters import StepCounter
    from syncheck.records import ValueDiff

# Settings changed by torch's schedulers.
_SCHEDULED = re.compile(r"\.(lr|momentum|betas(\.\d+)?)$")
CODE = "SYN106"
SLUG = "different-progress"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence, topic=CODE):
    """The sentences of this finding."""

    CAUSE = "The checkpoints are from different moments of the run: a rank saved, resumed or stopped at another step."
    DIFF_CAUSE = "A and B are from different moments of training: they record different steps."
    DIFF_FIX = "Compare files of one step: `syncheck show FILE` prints the step that a file stores."
    DIFF_PROGRESS = "A and B are at different points of training: {name:name} is {values:by_rank}"
    DIFF_STEP_COUNTERS = (
        "A and B took different numbers of optimizer steps: {counters:count step counter} "
        "{counters:verb differs|differ} by up to {lag:count step}, {counts:by_rank}"
    )
    DIFF_UNKNOWN_STEP_COUNTERS = (
        "A and B took different numbers of optimizer steps: {counters:count step counter} "
        "{counters:verb differs|differ} by an unknown number"
    )
    DIFF_FORWARDS_LAG_DESPITE_STEP = "`num_batches_tracked` lags too, although A and B recorded the same step"
    CAUSE_UNCOUNTED = (
        "The ranks record different steps: a rank saved, resumed or stopped at another step, or it skipped a step "
        "without counting the step."
    )
    FIX_UNCOUNTED = (
        "Compare the times at which the files were saved. Files of different steps: compare files of one step. Files "
        "of one moment: decide on all ranks together whether to skip a batch, and count the step on every rank. "
        "Before saving or resuming, all-reduce MIN and MAX of the step over the ranks and stop if they differ."
    )
    FIX = (
        "Compare files of one step. Before saving or resuming, all-reduce MIN and MAX of the step over the ranks and "
        "stop if they differ."
    )
    PROGRESS = "The ranks are at different points of the run: {name:name} is {values:by_rank}"
    STEP_COUNTERS = (
        "The ranks took different numbers of optimizer steps: {counters:count step counter} "
        "{counters:verb differs|differ} by up to {lag:count step}, {counts:by_rank}"
    )
    UNKNOWN_STEP_COUNTERS = (
        "The ranks took different numbers of optimizer steps: {counters:count step counter} "
        "{counters:verb differs|differ} by an unknown number"
    )
    MAY_BE_SKIPPED = "a rank that skips steps before it counts them would record the same, at the same moment"
    FORWARDS_LAG = "`num_batches_tracked` lags too"
    FORWARDS_LAG_DESPITE_STEP = "`num_batches_tracked` lags too, although all ranks recorded the same step"


def apply(case: Case) -> Match | None:
    """Match a step or epoch that differs, and cover everything changed by training."""
    recorded = _find_progress(case)
    if not recorded:
        return _match_step_counters(case)
    by_rank = _comparable_values(recorded[0])
    facts = (Text.PROGRESS(name=recorded[0].name, values=by_rank),)
    ranks = find_minority(by_rank) or case.group.ranks
    if case.group.is_pair or not _may_be_skipped(case, recorded):
        return _match(
            case,
            ranks=ranks,
            facts=facts,
            progress=by_rank,
        )
    match = _match(
        case,
        ranks=ranks,
        facts=(*facts, Text.MAY_BE_SKIPPED()),
        progress=by_rank,
    )
    return match.with_cause(Text.CAUSE_UNCOUNTED, Text.FIX_UNCOUNTED).as_consistent("SYN214")


def _find_progress(case: Case) -> list[ValueDiff]:
    """Return the recorded steps and epochs that differ."""
    return list(filter(_differs, case.of_values("progress")))


def _may_be_skipped(case: Case, recorded: Sequence[ValueDiff]) -> bool:
    """Whether ranks that skip steps without counting them explain the recorded progress."""
    # A rank that skips steps does not skip an epoch.
    if any("epoch" in progress.name.lower() for progress in recorded):
        return False
    # A progress in batches or samples lags by more than the steps of the optimizer.
    lags = _collect_lags(case, recorded)
    if min(lags, default=math.inf) <= BURST:
        return True
    return any(_lagged_less(case, progress) for progress in recorded)


def _collect_lags(case: Case, recorded: Sequence[ValueDiff]) -> list[float]:
    """Return the known lags of the recorded progress and of the step counters."""
    lag_of_name: dict[str, float] = {}
    for progress in recorded:
        lag_of_name[progress.name] = _find_lag(progress)
    # A counter of the optimizer may be recorded as progress too, and is exact.
    for counter in counters_of(case):
        lag_of_name[counter.name] = counter.lag
    return list(filter(None, lag_of_name.values()))


def _lagged_less(case: Case, progress: ValueDiff) -> bool:
    """Whether the ranks recorded a smaller lag at an earlier step, so that a rank skips steps again and again."""
    lag_now = _find_lag(progress)
    for group in case.steps()[:-1]:
        for value in group.values:
            # Without a lag, the ranks were equal at this step.
            has_smaller_lag = 0 < _find_lag(value) < lag_now
            if value.name == progress.name and has_smaller_lag:
                return True
    return False


def _find_lag(progress: ValueDiff) -> float:
    """Return the largest difference between the recorded numbers; 0 if a rank recorded something else."""
    numbers = []
    for value in progress.by_rank.values():
        if value is None:  # a rank without a recorded progress does not lag
            continue
        if not isinstance(value, (int, float)) or math.isnan(value):
            return 0.0
        numbers.append(float(value))
    return max(numbers, default=0.0) - min(numbers, default=0.0)


def _match_step_counters(case: Case) -> Match | None:
    """Match if all optimizer counters differ and no rule on skipped steps or lost state explains them better."""
    counters = counters_of(case)
    step_diffs = case.differing("optimizer_step")
    number = len(step_diffs) + len(names_of_values(counters))
    agreeing = case.agreeing("optimizer_step")
    if not number or agreeing:
        return None
    ranks = deviating_ranks(counters) or suspects(step_diffs, case.group)
    largest = farthest(counters)
    fact = _describe_counters(number, largest)
    if _missed_whole_steps(case, counters):
        return _match_whole_steps(
            case,
            ranks=ranks,
            fact=fact,
            largest=largest,
        )

    if _has_better_cause(case, counters):
        return None
    if largest is None:
        return _match(
            case,
            ranks=ranks,
            facts=(fact,),
            progress={},
        ).as_consistent("SYN214", "SYN215")
    return _match(
        case,
        ranks=ranks,
        facts=(fact,),
        progress=largest.by_rank,
    ).as_consistent("SYN215")


def _match_whole_steps(case: Case, ranks: Sequence[int], fact: Message, largest: StepCounter | None) -> Match:
    """Match counters that lag with BatchNorm's counts. largest: the known counter with the largest lag."""
    is_recorded = case.group.evidence.stores_progress
    lag = Text.FORWARDS_LAG_DESPITE_STEP() if is_recorded else Text.FORWARDS_LAG()
    counts = {} if largest is None else largest.by_rank
    # A rank that skips whole batches, or was set back, lags in the same way.
    return _match(
        case,
        ranks=ranks,
        facts=(fact, lag),
        progress=counts,
    ).as_consistent("SYN214", "SYN217")


def _missed_whole_steps(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether BatchNorm's counts lag like the counters, and by more than a few steps if the files record one step."""
    if not counters or not forwards_lag(case, counters):
        return False
    is_far = any(counter.far for counter in counters)
    return is_far or not case.group.evidence.stores_progress


def _describe_counters(number: int, largest: StepCounter | None) -> Message:
    """State how many step counters differ. largest: the known counter with the largest lag."""
    if largest is None:
        return Text.UNKNOWN_STEP_COUNTERS(counters=number)
    return Text.STEP_COUNTERS(
        counters=number,
        lag=int(largest.lag),
        counts=dict(largest.by_rank),
    )


def _has_better_cause(case: Case, counters: Sequence[StepCounter]) -> bool:
    """Whether skipped steps, lost optimizer state or overflows explain the counters."""
    are_recorded = case.group.evidence.stores_progress
    # Neither of two models has lost its state. A skipped step changes parameters.
    if case.group.is_pair:
        return are_recorded and not case.is_in_sync("parameter")
    # If the files record the same step, different counters have another cause.
    is_other_event = are_recorded or counters_of_lost_state(case) or counters_of_skipped_steps(case)
    if is_other_event:
        return True
    return bool(counters) and scaler_explains(case, counters)


def _match(case: Case, ranks: Sequence[int], facts: tuple[Message, ...], progress: Mapping[int, Any]) -> Match:
    """Cover everything changed by training, except differences between ranks of the same progress."""
    tensors = tuple(exclude_names(case.tensors, case.frozen))
    values = tuple(name for name in case.values if not is_setting(name) or _SCHEDULED.search(name))
    return Match(
        tensors=tensors,
        ranks=ranks,
        facts=facts,
        values=values,
        agree=_find_sets_of_progress(case, progress) if progress else None,
    )


def _find_sets_of_progress(case: Case, progress: Mapping[int, Any]) -> list[list[int]]:
    """Return the sets of ranks of the same progress."""
    known_progress: dict[int, Any] = {}
    unknown_ranks: list[int] = []
    for rank in case.group.ranks:
        value = progress.get(rank)
        if value is None:
            unknown_ranks.append(rank)
        else:
            known_progress[rank] = value
    sets = sorted(group_ranks(known_progress).values(), key=len, reverse=True) or [[]]
    # A rank of unknown progress may have the progress of the largest set of ranks.
    return [[*sets[0], *unknown_ranks], *sets[1:]]


def _differs(progress: ValueDiff) -> bool:
    """Whether two replicas record different values. A replica without a value does not differ."""
    return are_unequal(value for value in _comparable_values(progress).values() if value is not None)


def _comparable_values(progress: ValueDiff) -> dict[int, Any]:
    """Return the value of each rank, with NaN as text, because NaN is not equal to itself."""
    return {rank: value if value == value else "nan" for rank, value in progress.by_rank.items()}
