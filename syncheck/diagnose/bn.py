"""Running statistics: which tensors hold them, and statements of evidence for the rules on BatchNorm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.diagnose.case import Case, Match, is_weight
from syncheck.diagnose.history import last_agreement, suspects
from syncheck.diagnose.selection import (
    exclude_names,
    has_kind,
    last_part,
    list_names,
    module_of,
    out_of_sync,
    select_counting,
    select_kinds,
)
from syncheck.diagnose.statements import follower_facts, largest_difference
from syncheck.messages import Message, Sentence
from syncheck.tensors.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

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
    means_agree = not has_kind(statistics, "bn_mean")
    if means_agree and case.compared("bn_mean"):
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
    have_majority = all(map(_has_majority, statistics))
    return tuple(statistics) if have_majority else ()


def _has_majority(diff: TensorDiff) -> bool:
    """Whether most ranks agree. A reference outside of them is no majority."""
    if not diff.minority:
        return False
    largest_set = diff.clusters[0]
    return len(largest_set) > 1


def may_be_changed(case: Case) -> bool:
    """Whether some ranks or statistics agree, or all agreed before, although the batches of each rank change them all.

    Layers in evaluation mode agree too, and files saved after a broadcast. If no two of three or more ranks agree, a
    change on some ranks is no explanation.
    """
    names = case.names_of(*BN_STATISTICS)
    # Before the first step, all statistics are equal.
    steps = [group for group in case.steps() if group.step != 0]
    agreed_step = last_agreement(names, steps)
    if names and agreed_step is not None:
        return True
    differing = out_of_sync(case.group, *BN_STATISTICS)
    # With two ranks, no majority shows which of them changed.
    if case.number_of_ranks == 2:
        return not names.issubset(list_names(differing))
    return any(map(_has_majority, differing))


def is_batchnorm(case: Case, name: str) -> bool:
    """Whether a running statistic is BatchNorm's. Observation normalizers have no batch count and no weight."""
    names = case.group.evidence.names
    module = name.removesuffix("running_mean").removesuffix("running_var")
    siblings = {f"{module}num_batches_tracked", f"{module}weight"}
    present_siblings = siblings & names.keys()
    return bool(present_siblings) or name not in names


def running_statistics(case: Case, differing: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Select running statistics by dtype, by name, and by other names in the module."""
    modules = set()
    for name in case.group.evidence.names:
        if _has_name_of_statistic(name):
            module = module_of(name)
            modules.add(module)
    statistics = []
    for diff in differing:
        if _is_running_statistic(diff, modules):
            statistics.append(diff)
    return statistics


def _has_name_of_statistic(name: str) -> bool:
    """Whether the last part of a name is usual for a running statistic."""
    return _STATISTIC.fullmatch(last_part(name)) is not None


def _is_running_statistic(diff: TensorDiff, modules: Collection[str]) -> bool:
    """Whether a tensor is a running statistic. modules: those with names of statistics."""
    # Integers and masks count or select; they are no weights.
    has_whole_numbers = diff.dtype.startswith(("int", "uint", "bool"))
    if has_whole_numbers or _has_name_of_statistic(diff.name):
        return True
    is_beside_statistics = module_of(diff.name) in modules
    return is_beside_statistics and not is_weight(diff.name)


def match_statistics(
    case: Case, statistics: tuple[TensorDiff, ...], first: Sentence, synchronization: Sequence[Message]
) -> Match:
    """Return the match of running statistics: their size, the ranks that agree, and the other tensors that agree.

    first: the first statement, with the parameters count, total and size. synchronization: the last statements.
    """
    copies = statistics_of_copies(case)
    difference = first(
        count=len(statistics),
        total=case.compared(*BN_STATISTICS),
        size=largest_difference(statistics),
    )
    facts = [
        difference,
        *case.agreement_facts(statistics),
        _describe_parameters(case),
    ]
    if case.is_in_sync("bn_count"):
        facts.append(Statistics.COUNTS_AGREE())
    facts += follower_facts(copies)
    facts += synchronization
    return Match(
        tensors=(*statistics, *copies),
        ranks=suspects(statistics, case.group),
        facts=facts,
    )


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
    return tuple(filter(is_statistic, case.differing("ema")))


def is_statistic(diff: TensorDiff) -> bool:
    """Whether a tensor of the model or of an averaged copy is a running statistic of BatchNorm, by its name."""
    # The kind of a copy is "ema", whatever it is a copy of.
    return last_part(diff.name) in _LAST_PARTS


def explained_by_settings(case: Case) -> bool:
    """Whether SYN107 covers differing settings and the differing parameters that follow from them."""
    # SYN107 precedes the rules on BatchNorm, and covers the settings with the parameters.
    uncovered = frozenset(list_names(case.tensors))
    differing_parameters = out_of_sync(case.group, "parameter")
    covered_parameters = exclude_names(differing_parameters, uncovered)
    differing_values = select_counting(case.group.values)
    covered_values = exclude_names(differing_values, case.values)
    return bool(covered_parameters) and has_kind(covered_values, "setting")


def drift(group: Comparison) -> float:
    """Return the mean of the largest differences of all differing running statistics; 0.0 if all agree."""
    statistics = select_kinds(group.tensors, *BN_STATISTICS)
    largest = [float(diff.max_abs) for diff in statistics if diff.max_abs is not None]
    return sum(largest) / len(largest) if largest else 0.0
