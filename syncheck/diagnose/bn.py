"""Running statistics: which tensors hold them, and statements of evidence for the rules on BatchNorm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, is_weight
from syncheck.diagnose.history import last_agreement, suspects
from syncheck.diagnose.selection import exclude_names, has_kind, last_part, list_names, module_of, out_of_sync
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Comparison, TensorDiff

# Last parts of the names of running statistics: of BatchNorm, and of any module.
_LAST_PARTS = ("running_mean", "running_var")
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
    if not others_agree(case):
        return ()
    statistics = case.of_kind(*BN_STATISTICS)
    # Differences of the variances alone belong to SYN204.
    if case.compared("bn_mean") and not has_kind(statistics, "bn_mean"):
        return ()
    return statistics


def changed_on_some_ranks(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing statistics of BatchNorm if most ranks agree in each of them, and nothing else differs.

    Batches of their own make all ranks differ, so the statistics were changed on some ranks only.
    """
    # A stale rank has old statistics, and a rank with other counts saw other batches.
    if case.group.evidence.stale or not case.agrees("parameter", "bn_count"):
        return ()
    statistics = [diff for diff in statistics_alone(case) if is_batchnorm(case, diff.name)]
    if all(map(_has_majority, statistics)):
        return tuple(statistics)
    return ()


def _has_majority(diff: TensorDiff) -> bool:
    """Whether most ranks agree. A reference outside of them is no majority."""
    return bool(diff.minority) and len(diff.clusters[0]) > 1


def may_be_changed(case: Case) -> bool:
    """Whether some ranks or statistics agree, or all agreed before, although the batches of each rank change them all.

    Layers in evaluation mode agree too, and files saved after a broadcast. If no two of three or more ranks agree, a
    change on some ranks is no explanation.
    """
    # Before the first step, all statistics are equal.
    steps = [group for group in case.steps() if group.step != 0]
    names = case.names_of(*BN_STATISTICS)
    if names and last_agreement(names, steps) is not None:
        return True
    differing = out_of_sync(case.group, *BN_STATISTICS)
    if case.number_of_ranks > 2:
        return any(map(_has_majority, differing))
    return not names.issubset(list_names(differing))


def is_batchnorm(case: Case, name: str) -> bool:
    """Whether a running statistic is BatchNorm's. Observation normalizers have no batch count and no weight."""
    names = case.group.evidence.names
    module = name.removesuffix("running_mean").removesuffix("running_var")
    has_siblings = f"{module}num_batches_tracked" in names or f"{module}weight" in names
    return has_siblings or name not in names


def running_statistics(case: Case, differing: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Select running statistics by dtype, by name, and by other names in the module."""
    names = filter(_has_name_of_statistic, case.group.evidence.names)
    modules = frozenset(map(module_of, names))
    return [diff for diff in differing if _is_running_statistic(diff, modules)]


def _has_name_of_statistic(name: str) -> bool:
    return _STATISTIC.fullmatch(last_part(name)) is not None


def _is_running_statistic(diff: TensorDiff, modules: frozenset[str]) -> bool:
    """Whether a tensor is a running statistic. modules: those with names of statistics."""
    if diff.dtype.startswith(("int", "uint", "bool")) or _has_name_of_statistic(diff.name):
        return True
    return module_of(diff.name) in modules and not is_weight(diff.name)


def match_statistics(
    case: Case, statistics: tuple[TensorDiff, ...], first: Sentence, synchronization: Sequence[Message]
) -> Match:
    """Return the match of running statistics: their size, the ranks that agree, and the other tensors that agree.

    first: the first statement, with the parameters count, total and size. synchronization: the last statements.
    """
    total, size = case.compared(*BN_STATISTICS), largest_difference(statistics)
    copies = statistics_of_copies(case)
    facts = [
        first(count=len(statistics), total=total, size=size),
        *case.agreement_facts(statistics),
        _describe_parameters(case),
    ]
    if case.is_in_sync("bn_count"):
        facts.append(Statistics.COUNTS_AGREE())
    facts += follower_facts(copies)
    facts += synchronization
    return Match((*statistics, *copies), suspects(statistics, case.group), facts)


def _describe_parameters(case: Case) -> Message:
    """State whether the parameters agree, or why they differ beside the statistics."""
    total = case.compared("parameter")
    differing = out_of_sync(case.group, "parameter")
    if differing:
        sentence = Statistics.SETTINGS if explained_by_settings(case) else Statistics.OTHER_CAUSE
        return sentence(count=len(differing), total=total)
    if total:
        return Statistics.PARAMETERS_AGREE(count=total)
    return Statistics.PARAMETERS_NOT_COMPARED()


def statistics_of_copies(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing running statistics of averaged copies, which are averages or copies of the model's."""
    return tuple(diff for diff in case.differing("ema") if last_part(diff.name) in _LAST_PARTS)


def explained_by_settings(case: Case) -> bool:
    """Whether SYN107 covers differing settings and the differing parameters that follow from them."""
    # SYN107 precedes the rules on BatchNorm, and covers the settings with the parameters.
    uncovered = frozenset(list_names(case.tensors))
    if not exclude_names(out_of_sync(case.group, "parameter"), uncovered):
        return False
    covered_values = [value for value in case.group.values if value.counts and value.name not in case.values]
    return any(value.kind == "setting" for value in covered_values)


def drift(group: Comparison) -> float:
    """Return the mean of the largest differences of all differing running statistics; 0.0 if all agree."""
    largest = []
    for diff in group.tensors:
        if diff.kind in BN_STATISTICS and diff.max_abs is not None:
            largest.append(float(diff.max_abs))
    if largest:
        return sum(largest) / len(largest)
    return 0.0
