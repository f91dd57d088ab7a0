"""What the BatchNorm rules have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import agreement_text, gap_text, worst

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Group, TensorDiff

STATISTICS = ("bn_mean", "bn_var")


def statistics_alone(case: Case) -> tuple[TensorDiff, ...]:
    """Return the differing running statistics if nothing that would explain them differs, else nothing.

    Parameters that were not compared, left out by an option or sharded, do not count as differing. Variances alone are
    no drift: other data moves the means too.
    """
    found = case.of_kind(*STATISTICS) if case.agrees("parameter", "bn_count", "optimizer") else ()
    return () if case.compared("bn_mean") and all(diff.kind == "bn_var" for diff in found) else found


def evidence(case: Case, statistics: tuple[TensorDiff, ...]) -> str:
    """Say how many statistics differ and by how much, what agrees, and who agrees with whom."""
    parameters = case.compared("parameter")
    agreeing = f"all {parameters} parameters agree" if parameters else "parameters were not compared"
    if case.compared("bn_count"):
        agreeing += ", num_batches_tracked agrees"
    return (
        f"{len(statistics)} of {case.compared(*STATISTICS)} running statistics differ, {gap_text(worst(statistics))}; "
        f"{agreeing}{agreement_text(statistics, case.group)}"
    )


def drift(group: Group) -> float:
    """Return the mean over differing running statistics of their largest gap; 0.0 where all agree."""
    gaps = [float(diff.max_abs) for diff in group.tensors if diff.kind in STATISTICS and diff.max_abs is not None]
    return sum(gaps) / len(gaps) if gaps else 0.0
