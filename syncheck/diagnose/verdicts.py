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

    return with_findings(_as_group(comparison), diagnose_difference(comparison, allow))


def _as_group(comparison: Comparison) -> Group:
    """Return the comparison as a group without findings."""
    # `asdict` would copy the records of all tensors.
    content = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    return Group(**content)


def _has_doubt(group: Group, findings: Sequence[Finding]) -> bool:
    """Whether the comparison of two models rests on a guess, or is not complete. findings: of the group."""
    doubts = (group.evidence.inferred, group.evidence.guessed, _has_uncompared(group, findings))
    return any(doubts)


def _has_uncompared(group: Group, findings: Sequence[Finding]) -> bool:
    """Whether a tensor of two models could not be compared, and no finding that a user accepted explains it."""
    from syncheck.diagnose.measures import relation_of

    uncompared_names = {diff.name for diff in group.tensors if diff.uncompared}
    related_names = {diff.name for diff in group.tensors if relation_of(diff) is not None}
    # A baseline lists the tensors of its findings, and each of them was accepted.
    accepted_names = _list_names([finding for finding in findings if finding.accepted])
    # Tensors of other shapes have been compared if a relation explains them, and its code is allowed.
    allowed_names = _list_names([finding for finding in findings if finding.allowed])
    return not uncompared_names <= accepted_names | (allowed_names & related_names)


def _list_names(findings: Sequence[Finding]) -> set[str]:
    """Return the names of the tensors of findings."""
    names: set[str] = set()
    for finding in findings:
        names.update(finding.tensors)
    return names


def with_findings(group: Group, findings: tuple[Finding, ...]) -> Group:
    """Return a group of several replicas, or of two models, with findings and the resulting verdict."""
    verdict: Verdict = "in_sync"
    fails = any(finding.fails for finding in findings)
    if fails:
        verdict = "out_of_sync"
    elif _is_undecided(group, findings):
        verdict = "undecided"
    return replace(
        group,
        findings=findings,
        verdict=verdict,
    )


def _is_undecided(group: Group, findings: Sequence[Finding]) -> bool:
    """Whether too little was compared to show that the replicas are in sync. findings: of the group."""
    doubts = (
        group.is_pair and _has_doubt(group, findings),
        # Step counters alone do not show a model in sync.
        group.compared_kinds <= {"optimizer_step"},
        group.uncompared,
        # Equal files that claim to be one rank may be one file and its copy.
        group.evidence.claimed_twice,
        group.evidence.absent_shards is not None,
        group.evidence.doubt is not None,
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
