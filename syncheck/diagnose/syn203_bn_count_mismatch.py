"""BatchNorm counted different numbers of training batches on the ranks.

Signature: `num_batches_tracked` differs. It counts the forward passes in training mode since the buffers were created.
If means and variances agree, the finding is only "consistent": the statistics were copied or averaged over the ranks
without the counter, or something else changed the counter. A forward pass counts in all layers that it runs through.
If the counts of some layers agree, or two layers count together on one rank only, the finding is "consistent", too:
code may have edited or loaded a buffer.

Cause: the ranks ran different numbers of forward passes in training mode. Possible reasons are uneven data (with or
without `join`), a batch skipped by one rank, an additional forward pass in training mode on some ranks (warm-up,
calibration, evaluation without `.eval()`), or buffers loaded or edited on some ranks only.

Fix: give every rank the same number of batches (DistributedSampler, drop_last), and skip a batch on all ranks or on no
rank. Call `.eval()` before evaluation, and load the checkpoint on all ranks. Then broadcast the buffers once.

Incidents: NVIDIA-NeMo/Automodel#2468 (per-rank skip), ecmwf/WeatherGenerator#2718, pytorch/pytorch#111138.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match
from syncheck.diagnose.conditions import requires, state_if
from syncheck.diagnose.counters import may_be_old
from syncheck.diagnose.history import suspects
from syncheck.diagnose.rank_values import counts_of
from syncheck.diagnose.selection import out_of_sync, with_status
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


class Text(Sentence, topic=CODE):
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
    CAUSE_PART = (
        "Some ranks edited or loaded a buffer, or ran other numbers of forward passes in training mode through a part "
        "of the model: a forward pass through all layers would count in all of them."
    )
    FIX_PART = (
        "Look for code that sets or loads `num_batches_tracked` on some ranks, and for forward passes of some ranks "
        "through these layers alone. Then broadcast the buffers once: `for b in model.buffers(): dist.broadcast(b, 0)`."
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
    LAYERS_AGREE = "`num_batches_tracked` of {layers:count other layer} agrees"
    NOT_TOGETHER = "layers that count the same batches on one rank count different batches on another rank"
    STATISTICS_AGREE = "all {count:count running statistic} {count:verb agrees|agree}"
    STATISTICS_TOO = "{count:count running statistic} {count:verb differs|differ} too, {size}"


def _counts_differ(case: Case) -> bool:
    """Whether the ranks counted different numbers of batches."""
    return bool(case.of_kind("bn_count"))


@requires(_counts_differ)
def apply(case: Case) -> Match | None:
    """Match different counts, and cover the running statistics that follow from them."""
    counts = case.of_kind("bn_count")
    deviating_ranks = suspects(counts, case.group)
    statistics = case.of_kind(*BN_STATISTICS)
    facts = [
        _summarize(case, counts, deviating_ranks),
        *case.agreement_facts(counts),
        *_layer_facts(case, counts),
        *_statistics_facts(case, statistics),
    ]
    match = Match((*counts, *statistics), deviating_ranks, facts)

    # Other batches would have changed the statistics too.
    if case.is_in_sync(*BN_STATISTICS):
        return match.with_cause(Text.CAUSE_COUNT_ALONE, Text.FIX_COUNT_ALONE).as_consistent("SYN205")
    if _layer_facts(case, counts):
        return match.with_cause(Text.CAUSE_PART, Text.FIX_PART).as_consistent("SYN205")
    if not case.differing_parameters():
        return match
    # A file of an earlier step, and weights that were loaded on some ranks, have other counts and other parameters.
    if may_be_old(case):
        return match.as_consistent("SYN217")
    return match.as_consistent("SYN210")


def _summarize(case: Case, counts: Sequence[TensorDiff], deviating_ranks: tuple[int, ...]) -> Message:
    """State which ranks counted how many batches more or less."""
    size = _largest_lag(counts)
    if len(deviating_ranks) == case.number_of_ranks:
        return Text.ALL_RANKS(size=size, layers=len(counts))
    return Text.SOME_RANKS(
        ranks=deviating_ranks,
        size=size,
        layers=len(counts),
    )


def _layer_facts(case: Case, counts: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State that forward passes through the whole model do not explain the counts; empty if they do."""
    different = with_status(out_of_sync(case.group, "bn_count"), "different")
    agreeing = case.compared("bn_count") - len(different)
    return (
        *state_if(agreeing, Text.LAYERS_AGREE(layers=agreeing)),
        *state_if(not _count_together(counts), Text.NOT_TOGETHER()),
    )


def _count_together(counts: Sequence[TensorDiff]) -> bool:
    """Whether layers with equal counts on one rank have equal counts on every rank, as far as counts are known."""
    layers_by_count: dict[int, dict[float, set[str]]] = defaultdict(lambda: defaultdict(set))
    for diff in counts:
        for rank, count in counts_of(diff).items():
            layers_by_count[rank][count].add(diff.name)
    divisions = set()
    for layers in layers_by_count.values():
        divisions.add(frozenset(map(frozenset, layers.values())))
    return len(divisions) < 2


def _statistics_facts(case: Case, statistics: Sequence[TensorDiff]) -> tuple[Message, ...]:
    """State how many running statistics differ too, or that all agree. statistics: that differ."""
    are_in_sync = case.is_in_sync(*BN_STATISTICS)
    differing = Text.STATISTICS_TOO(count=len(statistics), size=largest_difference(statistics))
    agreeing = Text.STATISTICS_AGREE(count=case.compared(*BN_STATISTICS))
    return (*state_if(statistics, differing), *state_if(are_in_sync, agreeing))


def _largest_lag(counts: Sequence[TensorDiff]) -> Message:
    """State by how many batches the counts differ at most."""
    largest = 0
    for diff in counts:
        if diff.mismatched is None:  # only digests were compared
            return Text.BY_UNKNOWN_NUMBER()
        largest = max(largest, int(diff.max_abs or 0))
    return Text.BY_UP_TO(batches=largest)
