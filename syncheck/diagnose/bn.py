"""What the rules on running statistics have in common, BatchNorm's and others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from syncheck.diagnose.case import agreement_text, differ, gap_text, is_weight
from syncheck.kinds import BN_STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.diagnose.case import Case
    from syncheck.records import Comparison, TensorDiff

# Last parts of names of running statistics.
_STATISTIC = re.compile(
    r"_*(?:(?:\w+_)?(?:mean|var|std|counts?|min|max|min_val|max_val|usage|queue|ptr|centers?|centroids?|per_expert)|m2|n"
    r"|num_\w+|cluster_\w+|embed_avg|ema_\w+|zero_point|\w+_enabled|(?:weight_)?[uv]|s?[uv]\d+|\w*expert_bias"
    r"|e_score_correction_bias)",
    re.IGNORECASE,
)


def others_agree(case: Case) -> bool:
    """Whether nothing differs that would explain differing statistics.

    What was not compared does not, nor what has a cause of its own, such as a flipped bit.
    """
    return not case.of_kind("parameter", "bn_count", "optimizer")


def statistics_alone(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing running statistics if nothing that would explain them differs, else nothing.

    Parameters that were not compared, left out by an option or sharded, do not count as differing. Variances alone are
    no drift: other data moves the means too.
    """
    found = case.of_kind(*BN_STATISTICS) if others_agree(case) else ()
    return () if case.compared("bn_mean") and all(diff.kind == "bn_var" for diff in found) else found


def is_batchnorm(case: Case, name: str) -> bool:
    """Whether a running statistic is BatchNorm's: normalizers of observations count no batches and have no weight."""
    module = name.removesuffix("running_mean").removesuffix("running_var")
    siblings = {f"{module}num_batches_tracked", f"{module}weight"}
    return name not in case.group.evidence.names or not case.group.evidence.names.keys().isdisjoint(siblings)


def running_statistics(case: Case, apart: Sequence[TensorDiff]) -> list[TensorDiff]:
    """Return the tensors that are running statistics, by their dtype, or the names in their module."""
    named = (name.rpartition(".") for name in case.group.evidence.names)
    modules = {module for module, _, last in named if _STATISTIC.fullmatch(last)}
    return [
        diff
        for diff in apart
        if diff.dtype.startswith(("int", "uint", "bool"))
        or (diff.name.rpartition(".")[0] in modules and not is_weight(diff.name))
        or _STATISTIC.fullmatch(diff.name.rpartition(".")[2])
    ]


def evidence(case: Case, statistics: tuple[TensorDiff, ...]) -> str:
    """Say how many statistics differ and by how much, what agrees, and who agrees with whom."""
    parameters = case.compared("parameter")
    explained = [diff for diff in case.group.tensors if diff.out_of_sync and diff.kind == "parameter"]
    agreeing = f"all {parameters} parameters agree" if parameters else "parameters were not compared"
    if explained:
        agreeing = f"{len(explained)} of {parameters} parameters {differ(len(explained))} for another reason"
    if case.compared("bn_count") and case.agrees("bn_count"):
        agreeing += ", num_batches_tracked agrees"
    return (
        f"{len(statistics)} of {case.compared(*BN_STATISTICS)} running statistics differ, {gap_text(statistics)}"
        f"; {agreeing}{agreement_text(statistics, case.group)}"
    )


def drift(group: Comparison) -> float:
    """Return the mean over differing running statistics of their largest gap; 0.0 where all agree."""
    gaps = [float(diff.max_abs) for diff in group.tensors if diff.kind in BN_STATISTICS and diff.max_abs is not None]
    return sum(gaps) / len(gaps) if gaps else 0.0
