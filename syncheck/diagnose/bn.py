"""Running statistics: which tensors hold them, and statements of evidence for the rules on BatchNorm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, follower_facts, is_weight, largest_difference
from syncheck.diagnose.history import last_agreement, suspects
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Comparison, TensorDiff

# Last components of the names of running statistics.
_STATISTIC = re.compile(
    r"_*(?:(?:\w+_)?(?:mean|var|std|counts?|min|max|min_val|max_val|usage|queue|ptr|centers?|centroids?|per_expert)|m2|n"
    r"|num_\w+|cluster_\w+|embed_avg|ema_\w+|zero_point|\w+_enabled|(?:weight_)?[uv]|s?[uv]\d+|\w*expert_bias"
    r"|e_score_correction_bias)",
    re.IGNORECASE,
)


class Statistics(Sentence):
    """Statements about tensors beside the running statistics."""

    PARAMETERS_AGREE = "all parameters agree ({count} compared)"
    PARAMETERS_NOT_COMPARED = "no parameter was compared"
    SETTINGS = "{count} of {total:count parameter} {count:verb differs|differ} because of the settings (SYN107)"
    OTHER_CAUSE = "{count} of {total:count parameter} {count:verb differs|differ} for another reason"
    COUNTS_AGREE = "`num_batches_tracked` agrees"


def others_agree(case: Case) -> bool:
    """Whether no uncovered difference explains different statistics.

    Tensors without a comparison do not explain them, nor tensors with a cause of their own, for example a flipped bit.
    """
    return not case.of_kind("parameter", "bn_count", "optimizer")


def statistics_alone(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing running statistics, or nothing if another difference explains them.

    Parameters without a comparison (excluded by an option, or sharded) do not count as different. Returns nothing if
    only variances differ, because different data would change the means too.
    """
    statistics = case.of_kind(*BN_STATISTICS) if others_agree(case) else ()
    return () if case.compared("bn_mean") and all(diff.kind == "bn_var" for diff in statistics) else statistics


def changed_on_some_ranks(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing statistics of BatchNorm if most ranks agree in each of them, and nothing else differs.

    Batches of their own make all ranks differ, so the statistics were changed on some ranks only.
    """
    if case.group.evidence.stale or not case.agrees("parameter", "bn_count"):
        return ()
    statistics = [diff for diff in statistics_alone(case) if is_batchnorm(case, diff.name)]
    return tuple(statistics) if all(_has_majority(diff) for diff in statistics) else ()


def _has_majority(diff: TensorDiff) -> bool:
    """Whether most ranks agree. A reference outside of them is no majority."""
    return bool(diff.minority) and len(diff.clusters[0]) > 1


def may_be_changed(case: Case) -> bool:
    """Whether some ranks or statistics agree, or all agreed before, although the batches of each rank change them all.

    Layers in evaluation mode agree too, and files saved after a broadcast. Before the first step, all statistics are
    equal. If no two of three or more ranks agree, a change on some ranks is no explanation.
    """
    steps = [group for group in case.steps() if group.step != 0]
    names = frozenset().union(*map(case.names_of, BN_STATISTICS))
    if names and last_agreement(names, steps) is not None:
        return True
    differing = [diff for diff in case.group.tensors if diff.out_of_sync and diff.kind in BN_STATISTICS]
    if len(case.group.replicas) > 2:
        return any(_has_majority(diff) for diff in differing)
    return not names <= {diff.name for diff in differing}


def is_batchnorm(case: Case, name: str) -> bool:
    """Whether a running statistic is BatchNorm's. Observation normalizers have no batch count and no weight."""
    module = name.removesuffix("running_mean").removesuffix("running_var")
    siblings = {f"{module}num_batches_tracked", f"{module}weight"}
    return name not in case.group.evidence.names or not case.group.evidence.names.keys().isdisjoint(siblings)


def running_statistics(case: Case, differing: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Select running statistics by dtype, by name, and by other names in the module."""
    parts = (name.rpartition(".") for name in case.group.evidence.names)
    modules = {module for module, _, last in parts if _STATISTIC.fullmatch(last)}
    return [
        diff
        for diff in differing
        if diff.dtype.startswith(("int", "uint", "bool"))
        or (diff.name.rpartition(".")[0] in modules and not is_weight(diff.name))
        or _STATISTIC.fullmatch(diff.name.rpartition(".")[2])
    ]


def match_statistics(
    case: Case, statistics: tuple[TensorDiff, ...], first: Sentence, synchronization: Sequence[Message]
) -> Match:
    """Return the match of running statistics: their size, the ranks that agree, and the other tensors that agree.

    first: the first statement, with the parameters count, total and size. synchronization: the last statements.
    """
    total, size = case.compared(*BN_STATISTICS), largest_difference(statistics)
    facts = [first(count=len(statistics), total=total, size=size), *case.agreement_facts(statistics)]
    parameters = case.compared("parameter")
    explained = [diff for diff in case.group.tensors if diff.out_of_sync and diff.kind == "parameter"]
    if explained and explained_by_settings(case):
        facts.append(Statistics.SETTINGS(count=len(explained), total=parameters))
    elif explained:
        facts.append(Statistics.OTHER_CAUSE(count=len(explained), total=parameters))
    elif parameters:
        facts.append(Statistics.PARAMETERS_AGREE(count=parameters))
    else:
        facts.append(Statistics.PARAMETERS_NOT_COMPARED())
    if case.compared("bn_count") and case.agrees("bn_count"):
        facts.append(Statistics.COUNTS_AGREE())
    copies = statistics_of_copies(case)
    facts += follower_facts(copies)
    return Match((*statistics, *copies), suspects(statistics, case.group), [*facts, *synchronization])


def statistics_of_copies(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing running statistics of averaged copies, which are averages or copies of the model's."""
    last_parts = ("running_mean", "running_var")
    return tuple(diff for diff in case.differing("ema") if diff.name.rpartition(".")[2] in last_parts)


def explained_by_settings(case: Case) -> bool:
    """Whether SYN107 covers differing settings and the differing parameters that follow from them."""
    uncovered = {diff.name for diff in case.tensors}
    covered = [
        diff
        for diff in case.group.tensors
        if diff.out_of_sync and diff.kind == "parameter" and diff.name not in uncovered
    ]
    settings = [value for value in case.group.values if value.kind == "setting" and value.counts]
    return bool(covered) and any(value.name not in case.values for value in settings)


def drift(group: Comparison) -> float:
    """Return the mean of the largest differences of all differing running statistics; 0.0 if all agree."""
    largest = [float(diff.max_abs) for diff in group.tensors if diff.kind in BN_STATISTICS and diff.max_abs is not None]
    return sum(largest) / len(largest) if largest else 0.0
