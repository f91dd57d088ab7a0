"""Why do the replicas differ? One file per rule; the first that fits covers its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from syncheck.diagnose import (
    syn101_missing_tensors,
    syn102_shape_or_dtype_mismatch,
    syn103_prefix_normalized,
    syn104_sharded_by_design,
    syn105_tie_broken,
    syn106_different_progress,
    syn201_bn_local_stats,
    syn202_bn_drift_growing,
    syn203_bn_count_mismatch,
    syn299_unexplained_difference,
)
from syncheck.diagnose.case import Case, Rule
from syncheck.history import history_of
from syncheck.records import Finding

if TYPE_CHECKING:
    from syncheck.records import Group

# In the order of precedence. SYN103, SYN104 and SYN105 cover nothing, so their place does not matter.
RULES: tuple[Rule, ...] = cast(
    "tuple[Rule, ...]",
    (
        syn101_missing_tensors,
        syn102_shape_or_dtype_mismatch,
        syn106_different_progress,
        syn203_bn_count_mismatch,
        syn202_bn_drift_growing,
        syn201_bn_local_stats,
        syn299_unexplained_difference,
        syn103_prefix_normalized,
        syn104_sharded_by_design,
        syn105_tie_broken,
    ),
)


def diagnose(group: Group, series: tuple[Group, ...] = (), allow: frozenset[str] = frozenset()) -> tuple[Finding, ...]:
    """Explain every difference of a group; SYN299 takes what no other rule does, so nothing stays unexplained.

    series: the same run's groups by step, for rules that look at growth. allow: codes that do not fail the run.
    """
    tensors = tuple(diff for diff in group.tensors if diff.out_of_sync)
    values = tuple(diff.name for diff in group.values if diff.counts)
    findings = []
    for rule in RULES:
        match = rule.apply(Case(group, tensors, values, series or (group,)))
        if match is None:
            continue
        covered = {diff.name for diff in match.tensors}
        tensors = tuple(diff for diff in tensors if diff.name not in covered)
        values = tuple(name for name in values if name not in match.values)
        findings.append(
            Finding(
                code=rule.CODE,
                slug=rule.SLUG,
                severity=rule.SEVERITY,
                ranks=tuple(sorted(match.ranks)),
                tensors=tuple(diff.name for diff in match.tensors),
                evidence=match.evidence,
                cause=rule.CAUSE,
                fix=rule.FIX,
                values=match.values,
                allowed=rule.CODE in allow,
                history=history_of(covered, series),
            )
        )
    return tuple(findings)
