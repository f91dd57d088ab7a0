"""The checkpoints are from different moments of the run.

Signature: a step or epoch counter of the checkpoint differs between ranks. Or the files record the same step, but
BatchNorm's counts and all step counters of the optimizer lag on the same ranks, by more than a step or two. Or no step
is stored, all step counters of the optimizer differ, and neither a skipped step (SYN214) nor unrestored state (SYN215)
explains them. A recorded epoch, or a recorded step more than ten steps behind, proves another moment. A rank that skips
a step before it counts the step records a smaller step too, in a file of the same moment. If the recorded step lags by
ten steps or less and no epoch differs, or if the lag grew since an earlier step, the finding is therefore "consistent",
beside SYN214. So is a finding by counters alone. Tensors changed by training may differ between ranks of different
progress. Frozen parameters, weight decay, and differences between ranks of the same step have another cause.

Cause: a rank did not save at the last step, an older file remained in the folder, the ranks resumed from checkpoints of
different steps, or one rank stopped earlier than the other ranks.

Fix: compare files of one step. If all files are from the last save, make all ranks agree on the step before they save
or resume: all-reduce the MIN and MAX of the step, and stop if they differ.

Incidents: mosaicml/composer#2146 (ranks resumed from different checkpoints), hiyouga/LLaMA-Factory#655,
huggingface/transformers#28270; Megatron-LM warns and takes the larger step.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.counters import (
    BURST,
    counters_of,
    farthest,
    find_minority,
    fitting,
    forwards_lag,
    odd_ranks,
    scaler_explains,
)
from syncheck.diagnose.history import suspects
from syncheck.messages import Message, Sentence
from syncheck.records import group_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import ValueDiff

# Settings changed by torch's schedulers.
_SCHEDULED = re.compile(r"\.(lr|momentum|betas(\.\d+)?)$")
CODE = "SYN106"
SLUG = "different-progress"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "The checkpoints are from different moments of the run: a rank saved, resumed or stopped at another step."
    DIFF_CAUSE = "A and B are from different moments of training: they record different steps."
    DIFF_FIX = "Compare files of one step: syncheck show FILE prints the step that a file stores."
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
    progress = next((diff for diff in case.of_values() if diff.kind == "progress" and _differs(diff)), None)
    if progress is None:
        return _match_step_counters(case)
    by_rank = _comparable_values(progress)
    facts = (Text.PROGRESS(name=progress.name, values=by_rank),)
    ranks = find_minority(by_rank) or case.group.ranks
    if case.group.is_pair or not _may_be_skipped(case):
        return _match(case, ranks, facts, by_rank)
    match = _match(case, ranks, (*facts, Text.MAY_BE_SKIPPED()), by_rank)
    match = replace(match, cause=Text.CAUSE_UNCOUNTED, fix=Text.FIX_UNCOUNTED)
    return replace(match, certainty="consistent", alternatives=("SYN214",))


def _may_be_skipped(case: Case) -> bool:
    """Whether ranks that skip steps without counting them explain the recorded progress."""
    recorded = [diff for diff in case.of_values() if diff.kind == "progress" and _differs(diff)]
    if any("epoch" in diff.name.lower() for diff in recorded):
        return False
    lags = {diff.name: _find_lag(diff) for diff in recorded}
    # A progress in batches or samples lags by more than the steps of the optimizer.
    lags |= {counter.name: counter.lag for counter in counters_of(case)}
    known = [lag for lag in lags.values() if lag is not None]
    return (bool(known) and min(known) <= BURST) or any(_lagged_less(case, diff) for diff in recorded)


def _lagged_less(case: Case, progress: ValueDiff) -> bool:
    """Whether the ranks recorded a smaller lag at an earlier step, so that a rank skips steps again and again."""
    now = _find_lag(progress)
    for group in case.steps()[:-1]:
        for earlier in group.values:
            lag = _find_lag(earlier) if earlier.name == progress.name else None
            if lag and now is not None and lag < now:
                return True
    return False


def _find_lag(progress: ValueDiff) -> float | None:
    """Return the largest difference between the recorded numbers; None if a rank recorded no number."""
    values = [value for value in progress.by_rank.values() if value is not None]
    numbers = [float(value) for value in values if isinstance(value, (int, float)) and value == value]
    return max(numbers) - min(numbers) if numbers and len(numbers) == len(values) else None


def _match_step_counters(case: Case) -> Match | None:
    """Match if all optimizer counters differ and no rule on skipped steps or lost state explains them better."""
    known = counters_of(case)
    steps = case.differing("optimizer_step")
    number = len(steps) + sum(counter.diff is None for counter in known)
    if not number or case.agreeing("optimizer_step"):
        return None
    ranks = odd_ranks(known) or suspects(steps, case.group)
    most = farthest(known)
    if most is None:
        fact, counts = Text.UNKNOWN_STEP_COUNTERS(counters=number), {}
    else:
        counts = dict(most.by_rank)
        fact = Text.STEP_COUNTERS(counters=number, lag=int(most.lag), counts=counts)
    stored = case.group.evidence.stores_progress
    if known and forwards_lag(case, known) and (not stored or any(counter.far for counter in known)):
        lag = Text.FORWARDS_LAG_DESPITE_STEP() if stored else Text.FORWARDS_LAG()
        # A rank that skips whole batches, or was set back, lags in the same way.
        return replace(
            _match(case, ranks, (fact, lag), counts), certainty="consistent", alternatives=("SYN214", "SYN217")
        )
    # If the files record the same step, different counters have another cause.
    if stored or fitting(case, far=True) or fitting(case, far=False) or (known and scaler_explains(case, known)):
        return None
    others = ("SYN215",) if counts else ("SYN214", "SYN215")
    return replace(_match(case, ranks, (fact,), counts), certainty="consistent", alternatives=others)


def _match(case: Case, ranks: Sequence[int], facts: tuple[Message, ...], progress: Mapping[int, Any]) -> Match:
    """Cover everything changed by training, except differences between ranks of the same progress.

    A rank of unknown progress may have the progress of the largest set of ranks.
    """
    tensors = tuple(diff for diff in case.tensors if diff.name not in case.frozen)
    values = tuple(name for name in case.values if ".param_groups." not in name or _SCHEDULED.search(name))
    known = group_ranks({rank: value for rank, value in progress.items() if value is not None})
    largest, *others = sorted(known.values(), key=len, reverse=True) or [[]]
    unknown = [rank for rank in case.group.ranks if progress.get(rank) is None]
    agree = [[*largest, *unknown], *others] if progress else None
    return Match(tensors, ranks, facts, values, agree=agree)


def _differs(diff: ValueDiff) -> bool:
    """Whether two replicas record different values. A replica without a value does not differ."""
    return len({value for value in _comparable_values(diff).values() if value is not None}) > 1


def _comparable_values(diff: ValueDiff) -> dict[int, Any]:
    """Return the value of each rank, with NaN as text, because NaN is not equal to itself."""
    return {rank: value if value == value else "nan" for rank, value in diff.by_rank.items()}
