"""Derive findings and verdicts from comparisons."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from syncheck.records import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Comparison, Finding, Unreadable, Verdict


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
    return with_findings(group, diagnose(comparison, series, allow))


def _may_have_findings(group: Group) -> bool:
    """Whether something differs, or was normalized or sharded, so that a rule may match."""
    differs = bool(group.tensors or group.values)
    has_information = bool(group.evidence.normalized or group.shards or group.ties)
    return differs or has_information


def judge_difference(comparison: Comparison, allow: frozenset[str]) -> Group:
    """Diagnose the comparison of two models and add the verdict.

    Unlike replicas, two models are in sync only if every tensor could be compared, apart from RNG states and, if B may
    lack tensors, tensors of A alone. Equal data shows that a map is possible, not that it is right, so a verdict that
    rests on an inferred map is undecided.
    """
    from syncheck.diagnose.rules import diagnose_difference

    group = with_findings(_as_group(comparison), diagnose_difference(comparison, allow))
    if group.verdict != "in_sync":
        return group
    is_proposal = comparison.evidence.inferred or comparison.evidence.guessed
    if is_proposal or _has_uncompared(group):
        return replace(group, verdict="undecided")
    return group


def _as_group(comparison: Comparison) -> Group:
    """Return the comparison as a group without findings."""
    return Group(**{part.name: getattr(comparison, part.name) for part in fields(comparison)})


def _has_uncompared(group: Group) -> bool:
    """Whether a tensor of two models could not be compared."""
    from syncheck.diagnose.measures import relation_of

    accepted: set[str] = set()
    for finding in group.findings:
        if finding.allowed:
            accepted.update(finding.tensors)
    for diff in group.tensors:
        # Tensors of other shapes have been compared if a relation explains them, and its code is allowed.
        is_explained = diff.name in accepted and relation_of(diff) is not None
        if diff.uncompared and not is_explained:
            return True
    return False


def with_findings(group: Group, findings: tuple[Finding, ...]) -> Group:
    """Return a group of several replicas with findings and the resulting verdict."""
    verdict: Verdict = "in_sync"
    if any(finding.fails for finding in findings):
        verdict = "out_of_sync"
    elif _is_undecided(group):
        verdict = "undecided"
    return replace(group, findings=findings, verdict=verdict)


def _is_undecided(group: Group) -> bool:
    """Whether too little was compared to show that the replicas are in sync."""
    compared_kinds = [kind for kind, counts in group.kinds.items() if counts.compared]
    # Step counters alone do not show a model in sync.
    if not set(compared_kinds) - {"optimizer_step"}:
        return True
    # Equal files that claim to be one rank may be one file and its copy.
    if group.uncompared or group.evidence.claimed_twice:
        return True
    if any(diff.unknown for diff in group.tensors):
        return True
    return any(value.unknown for value in group.values)


def overall(groups: Sequence[Group], unreadable: Sequence[Unreadable]) -> Verdict:
    """Return the verdict for all groups: in sync only if all groups are in sync and all files could be read.

    A checkpoint without replicas is a group of its own and makes the verdict undecided.
    """
    verdicts = {group.verdict for group in groups}
    if "out_of_sync" in verdicts:
        return "out_of_sync"
    return "in_sync" if verdicts == {"in_sync"} and not unreadable else "undecided"
