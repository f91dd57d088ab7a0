"""BatchNorm counted different numbers of training batches on the ranks.

Signature: `num_batches_tracked` differs. It counts the forward passes in training mode since the buffers were created.
If means and variances agree, the finding is only "consistent": the statistics were copied or averaged over the ranks
without the counter, or something else changed the counter.

Cause: the ranks ran different numbers of forward passes in training mode. Possible reasons are uneven data (with or
without `join`), a batch skipped by one rank, an additional forward pass in training mode on some ranks (warm-up,
calibration, evaluation without `.eval()`), or buffers loaded on some ranks only.

Fix: give every rank the same number of batches (DistributedSampler, drop_last), and skip a batch on all ranks or on no
rank. Call `.eval()` before evaluation, and load the checkpoint on all ranks. Then broadcast the buffers once.

Incidents: NVIDIA-NeMo/Automodel#2468 (per-rank skip), ecmwf/WeatherGenerator#2718, pytorch/pytorch#111138.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.counters import may_be_old
from syncheck.diagnose.history import suspects
from syncheck.diagnose.statements import largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import TensorDiff

CODE = "SYN203"
SLUG = "bn-count-mismatch"
SEVERITY = "error"
CERTAINTY = "proved"


class Text(Sentence):
    """The sentences of this finding."""

    CAUSE = (
        "The ranks ran different numbers of forward passes in training mode, so their running statistics come from "
        "different data."
    )
    CAUSE_COUNT_ALONE = (
        "The ranks counted different numbers of batches, but their running statistics agree: the statistics were "
        "copied or averaged over the ranks without the counter, or the counter itself was loaded or changed."
    )
    FIX_COUNT_ALONE = (
        "Look for code that copies, averages or loads `running_mean` and `running_var` without `num_batches_tracked`, "
        "and for a forward pass on some ranks only. Then broadcast the buffers once: `for b in model.buffers(): "
        "dist.broadcast(b, 0)`."
    )
    FIX = (
        "Give every rank the same number of batches, skip a batch on all ranks or on no rank, and call .eval() before "
        "evaluation. Then broadcast the buffers once: `for b in model.buffers(): dist.broadcast(b, 0)`."
    )
    SOME_RANKS = (
        "{ranks:Ranks} counted a different number of training batches: `num_batches_tracked` differs {size} in "
        "{layers:count layer}"
    )
    ALL_RANKS = (
        "The ranks counted different numbers of training batches: `num_batches_tracked` differs {size} in "
        "{layers:count layer}"
    )
    BY_UP_TO = "by up to {batches:count batch|batches}"
    BY_UNKNOWN_NUMBER = "by an unknown number"
    STATISTICS_AGREE = "all {count:count running statistic} {count:verb agrees|agree}"
    STATISTICS_TOO = "{count:count running statistic} {count:verb differs|differ} too, {size}"


def apply(case: Case) -> Match | None:
    """Match different counts, and cover the running statistics that follow from them."""
    counts = case.of_kind("bn_count")
    if not counts:
        return None
    odd = suspects(counts, case.group)
    size = _largest_lag(counts)
    if len(odd) == len(case.group.replicas):
        facts = [Text.ALL_RANKS(size=size, layers=len(counts))]
    else:
        facts = [Text.SOME_RANKS(ranks=odd, size=size, layers=len(counts))]
    facts += case.agreement_facts(counts)
    statistics = case.of_kind(*BN_STATISTICS)
    if statistics:
        facts.append(Text.STATISTICS_TOO(count=len(statistics), size=largest_difference(statistics)))
    match = Match((*counts, *statistics), odd, facts)
    compared = case.compared(*BN_STATISTICS)
    if compared and case.agrees(*BN_STATISTICS):
        facts.append(Text.STATISTICS_AGREE(count=compared))
        match = replace(match, cause=Text.CAUSE_COUNT_ALONE, fix=Text.FIX_COUNT_ALONE)
        return replace(match, certainty="consistent", alternatives=("SYN205",))
    if not case.differing_parameters():
        return match
    # A file of an earlier step, and weights that were loaded on some ranks, have other counts and other parameters.
    others = ("SYN217",) if may_be_old(case) else ("SYN210",)
    return replace(match, certainty="consistent", alternatives=others)


def _largest_lag(counts: Sequence[TensorDiff]) -> Message:
    if any(diff.mismatched is None for diff in counts):
        return Text.BY_UNKNOWN_NUMBER()
    return Text.BY_UP_TO(batches=max(int(diff.max_abs or 0) for diff in counts))
