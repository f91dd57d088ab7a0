"""Derive findings and verdicts from comparisons."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from syncheck.records import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Comparison, Finding, TensorDiff, Unreadable, ValueDiff, Verdict


def judge_group(comparison: Comparison, run: Sequence[Comparison], allow: frozenset[str]) -> Group:
    """Diagnose a comparison and add the verdict.

    run: the comparisons of all steps of the run. The diagnosis of the last step uses all of them.
    """
    group = _as_group(comparison)
    if len(group.replicas) == 1:
        return replace(group, verdict="alone")
    if not _may_have_findings(group):
        return with_findings(group, ())

    from syncheck.diagnose.rules import diagnose  # 30 modules, only needed if something differs

    series: tuple[Comparison, ...] = ()
    # Final files may repeat the last step of the run.
    if run and run[-1].step == group.step:
        series = (*run[:-1], comparison)
    findings = diagnose(comparison, series, allow)
    return with_findings(group, findings)


def _may_have_findings(group: Group) -> bool:
    """Whether something differs, or was normalized or sharded, so that a rule may match."""
    inputs_of_rules = (
        group.tensors,
        group.values,
        group.evidence.normalized,
        group.shards,
        group.ties,
    )
    return any(inputs_of_rules)


def judge_difference(comparison: Comparison, allow: frozenset[str]) -> Group:
    """Diagnose the comparison of two models and add the verdict.

    Unlike replicas, two models are in sync only if every tensor could be compared, apart from RNG states and, if B may
    lack tensors, tensors of A alone. Equal data shows that a map is possible, not that it is right, so a verdict that
    rests on an inferred map is undecided.
    """
    from syncheck.diagnose.rules import diagnose_difference

    findings = diagnose_difference(comparison, allow)
    group = with_findings(_as_group(comparison), findings)
    doubts = (
        comparison.evidence.inferred,
        comparison.evidence.guessed,
        _has_uncompared(group),
    )
    if group.verdict == "in_sync" and any(doubts):
        return replace(group, verdict="undecided")
    return group


def _as_group(comparison: Comparison) -> Group:
    """Return the comparison as a group without findings."""
    # `asdict` would copy the records of all tensors.
    content = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    return Group(**content)


def _has_uncompared(group: Group) -> bool:
    """Whether a tensor of two models could not be compared."""
    from syncheck.diagnose.measures import relation_of

    allowed_names = _list_allowed(group)
    uncompared = [diff for diff in group.tensors if diff.uncompared]
    for diff in uncompared:
        has_relation = relation_of(diff) is not None
        # Tensors of other shapes have been compared if a relation explains them, and its code is allowed.
        is_explained = has_relation and diff.name in allowed_names
        if not is_explained:
            return True
    return False


def _list_allowed(group: Group) -> frozenset[str]:
    """Return the names of the tensors of allowed findings."""
    names: set[str] = set()
    for finding in group.findings:
        if finding.allowed:
            names.update(finding.tensors)
    return frozenset(names)


def with_findings(group: Group, findings: tuple[Finding, ...]) -> Group:
    """Return a group of several replicas with findings and the resulting verdict."""
    verdict: Verdict = "in_sync"
    fails = any(finding.fails for finding in findings)
    if fails:
        verdict = "out_of_sync"
    elif _is_undecided(group):
        verdict = "undecided"
    return replace(
        group,
        findings=findings,
        verdict=verdict,
    )


def _is_undecided(group: Group) -> bool:
    """Whether too little was compared to show that the replicas are in sync."""
    doubts = (
        # Step counters alone do not show a model in sync.
        group.compared_kinds <= {"optimizer_step"},
        group.uncompared,
        # Equal files that claim to be one rank may be one file and its copy.
        group.evidence.claimed_twice,
    )
    if any(doubts):
        return True
    differences: tuple[TensorDiff | ValueDiff, ...] = (
        *group.tensors,
        *group.values,
    )
    return any(diff.unknown for diff in differences)


def overall(groups: Sequence[Group], unreadable: Sequence[Unreadable]) -> Verdict:
    """Return the verdict for all groups: in sync only if all groups are in sync and all files could be read.

    A checkpoint without replicas is a group of its own and makes the verdict undecided.
    """
    verdicts = {group.verdict for group in groups}
    if "out_of_sync" in verdicts:
        return "out_of_sync"
    # Without any group, nothing was compared.
    are_all_in_sync = verdicts == {"in_sync"}
    return "in_sync" if are_all_in_sync and not unreadable else "undecided"
