"""Some ranks skipped an optimizer step.

Signature: the optimizer's step counters differ by one or two steps, or by less than 5 % of the larger count, and
parameters or optimizer state differ too. The steps stored in the checkpoints are equal, or there are none. BatchNorm's
counts usually agree, because the forward pass ran; if they lag too, the rank missed the whole step. SGD counts no
steps. A skipped step is then recognizable only if this step and the previous step were saved: the parameters and the
optimizer state of the rank are bitwise equal to the other ranks' values at the previous step, and BatchNorm's counts
agree.

Cause: a rank skipped a batch on its own: `continue` for a bad or short batch, a NaN or infinite loss or gradient on
this rank only, or missing gradients (None). In a run of a few steps, optimizer state lost at the start looks the same;
the evidence then mentions it.

Fix: decide on all ranks together. All-reduce the flag (MAX) before the step, so either all ranks step or none. Then
restart from a checkpoint in which the ranks agree, or broadcast the parameters and optimizer state of one rank.

Incidents: NVIDIA-NeMo/Automodel#2468 (per-rank `continue`, different micro-step counts), ecmwf/WeatherGenerator#2718
and #2724 (the same). Checkpoints of several steps show whether a rank skips steps repeatedly: its lag then grows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.counters import (
    FEW,
    SHORT,
    counter_facts,
    counters_of,
    earlier_lag,
    farthest,
    fitting,
    followers,
    forwards_lag,
    lag_grew,
    may_be_old,
    names_of_values,
    odd_ranks,
    only_skipped,
    scales_of,
    stale_at_first,
    stale_facts,
    trackers,
)
from syncheck.messages import Message, Sentence

if TYPE_CHECKING:
    from syncheck.diagnose.counters import StepCounter

CODE = "SYN214"
SLUG = "step-skipped"
SEVERITY = "error"
CERTAINTY = "likely"
_DECIDE_TOGETHER = (
    "Decide on all ranks together: bad = torch.tensor(float(skip), device=device); "
    "dist.all_reduce(bad, op=dist.ReduceOp.MAX); if bad: optimizer.zero_grad(); continue."
)


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = "A rank skipped an optimizer step that the other ranks took, because it decided on its own to skip a batch."
    DIFF_CAUSE = "One of the runs skipped an optimizer step that the other run took."
    DIFF_FIX = "Look for skipped batches, overflows of the loss scaler and NaN in the logs of both runs."
    DIFF_BATCHES_COUNTED = "BatchNorm counted the same batches in both runs"
    FIX = f"{_DECIDE_TOGETHER} Then restart from a checkpoint in which the ranks agree."
    IN_A_JOB = f"{_DECIDE_TOGETHER} To continue this run: syncheck.live.resync(model, optimizer) on all ranks."
    IN_A_JOB_NO_MAJORITY = (
        f"{_DECIDE_TOGETHER} To continue this run: syncheck.live.resync(model, optimizer, source=RANK) on all ranks, "
        "with a rank that took all steps."
    )
    SKIPPED = "{ranks:Ranks} skipped {lag:count optimizer step} that {others:ranks} took"
    SKIPPED_UP_TO = "{ranks:Ranks} skipped up to {lag:count optimizer step} that {others:ranks} took"
    SKIPPED_AFTER_FORWARD = "{ranks:Ranks} ran the forward pass but skipped the optimizer step"
    BATCHES_COUNTED = "BatchNorm counted the same batches on all ranks"
    FORWARD_MISSING = "num_batches_tracked lags too, so the forward pass was also skipped or undone"
    FORWARD_RAN = "num_batches_tracked agrees"
    REPEATED = "at step {step} the lag was {lag:count step}, so steps were skipped more than once"
    LOST_STATE = "optimizer state lost after {lag:count step} would look the same"
    STEP_UNKNOWN = "the files do not store their step, so they may be of different steps"


def apply(case: Case) -> Match | None:
    """Match step counters with a small lag, or a rank with stale values after its forward pass."""
    counters = fitting(case, far=False)
    first = stale_at_first(case)
    if first is not None and (not only_skipped(first) or scales_of(case.group)):
        first = None
    if first is not None:
        counters = counters_of(case)
    elif not counters:
        return None
    tensors = followers(case, counters)
    if not any(diff.kind in ("parameter", "optimizer") for diff in tensors) and not counters:
        return None
    ranks = odd_ranks(counters) if first is None else tuple(first.evidence.stale)
    most = farthest(counters)
    facts = [
        Text.SKIPPED_AFTER_FORWARD(ranks=ranks) if most is None else _summary(most),
        *counter_facts(counters),
        *case.parameter_facts(tensors),
    ]
    if first is not None:
        facts += [*stale_facts(first), Text.BATCHES_COUNTED()]
    else:
        facts += _forward_facts(case, counters)
    if most is not None:
        if earlier := earlier_lag(most, case.series):
            facts.append(Text.REPEATED(step=earlier[0], lag=earlier[1]))
        if first is None:
            facts += _doubts(case, most)
    values = (*names_of_values(counters), *trackers(case, ranks))
    match = Match(tensors, ranks, facts, values)
    others = () if first is not None or most is None else _find_alternatives(case, most)
    return replace(match, certainty="consistent", alternatives=others) if others else match


def _summary(counter: StepCounter) -> Message:
    """State which ranks took fewer steps than the ranks with the highest count."""
    highest = max(counter.by_rank.values())
    others = tuple(sorted(rank for rank, count in counter.by_rank.items() if count == highest))
    lags = {highest - counter.by_rank[rank] for rank in counter.behind}
    sentence = Text.SKIPPED if len(lags) == 1 else Text.SKIPPED_UP_TO
    return sentence(ranks=counter.behind, lag=int(counter.lag), others=others)


def _forward_facts(case: Case, counters: tuple[StepCounter, ...]) -> list[Message]:
    if forwards_lag(case, counters):
        return [Text.FORWARD_MISSING()]
    if case.compared("bn_count") and case.agrees("bn_count"):
        return [Text.FORWARD_RAN()]
    return []


def _find_alternatives(case: Case, counter: StepCounter) -> tuple[str, ...]:
    """Return the codes of other causes with the same evidence."""
    if lag_grew(counter, case.series):
        return ()
    others = []
    if may_be_old(case):
        others.append("SYN217")
    if int(counter.lag) > FEW or max(counter.by_rank.values()) <= SHORT:
        others.append("SYN215")
    return tuple(others)


def _doubts(case: Case, counter: StepCounter) -> list[Message]:
    """State other causes with the same evidence."""
    doubts, lag = [], int(counter.lag)
    if lag > FEW or max(counter.by_rank.values()) <= SHORT:
        doubts.append(Text.LOST_STATE(lag=lag))
    if may_be_old(case):
        doubts.append(Text.STEP_UNKNOWN())
    return doubts
