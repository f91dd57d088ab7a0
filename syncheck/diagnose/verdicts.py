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
    group = Group(**{part.name: getattr(comparison, part.name) for part in fields(comparison)})
    if len(group.replicas) == 1:
        return replace(group, verdict="alone")
    findings: tuple[Finding, ...] = ()
    if group.tensors or group.values or group.evidence.normalized or group.shards or group.ties:
        from syncheck.diagnose.rules import diagnose  # 30 modules, only needed if something differs

        # Final files may repeat the last step of the run.
        is_last = bool(run) and run[-1].step == group.step
        findings = diagnose(comparison, (*run[:-1], comparison) if is_last else (), allow)
    return with_findings(group, findings)


def judge_difference(comparison: Comparison, allow: frozenset[str]) -> Group:
    """Diagnose the comparison of two models and add the verdict.

    Unlike replicas, two models are in sync only if every tensor could be compared, apart from RNG states and, if B may
    lack tensors, tensors of A alone. Equal data shows that a map is possible, not that it is right, so a verdict that
    rests on an inferred map is undecided.
    """
    from syncheck.diagnose.measures import relation_of
    from syncheck.diagnose.rules import diagnose_difference

    group = Group(**{part.name: getattr(comparison, part.name) for part in fields(comparison)})
    judged = with_findings(group, diagnose_difference(comparison, allow))
    is_proposal = comparison.evidence.inferred or bool(comparison.evidence.guessed)
    accepted = {name for finding in judged.findings if finding.allowed for name in finding.tensors}
    # Tensors of other shapes have been compared if a relation explains them, and its code is allowed.
    unknown = (diff for diff in judged.tensors if diff.uncompared)
    doubtful = is_proposal or any(diff.name not in accepted or relation_of(diff) is None for diff in unknown)
    return replace(judged, verdict="undecided") if doubtful and judged.verdict == "in_sync" else judged


def with_findings(group: Group, findings: tuple[Finding, ...]) -> Group:
    """Return a group of several replicas with findings and the resulting verdict.

    Equal files that claim to be one rank may be one file and its copy, so they do not show that ranks are in sync.
    """
    verdict: Verdict = "in_sync"
    if any(finding.fails for finding in findings):
        verdict = "out_of_sync"
    elif not _count_compared(group) or group.uncompared or _has_unknown(group) or group.evidence.claimed_twice:
        verdict = "undecided"
    return replace(group, findings=findings, verdict=verdict)


def _has_unknown(group: Group) -> bool:
    """Whether a tensor or a value of the model may differ."""
    return any(diff.unknown for diff in group.tensors) or any(value.unknown for value in group.values)


def _count_compared(group: Group) -> int:
    """Return the number of compared tensors, except step counters: they alone do not show a model in sync."""
    return sum(counts.compared for kind, counts in group.kinds.items() if kind != "optimizer_step")


def overall(groups: Sequence[Group], unreadable: Sequence[Unreadable]) -> Verdict:
    """Return the verdict for all groups: in sync only if all groups are in sync and all files could be read.

    A checkpoint without replicas is a group of its own and makes the verdict undecided.
    """
    verdicts = {group.verdict for group in groups}
    if "out_of_sync" in verdicts:
        return "out_of_sync"
    return "in_sync" if verdicts == {"in_sync"} and not unreadable else "undecided"
