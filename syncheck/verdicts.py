"""Derive the findings and the verdict of each group, and the verdict of the report."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from syncheck.records import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Comparison, Finding, Unreadable, Verdict


def judge_group(comparison: Comparison, run: Sequence[Comparison], allow: frozenset[str]) -> Group:
    """Diagnose a comparison and add the verdict. run: its steps, all of which the diagnosis of the last step uses."""
    group = Group(**{part.name: getattr(comparison, part.name) for part in fields(comparison)})
    if len(group.replicas) == 1:
        return replace(group, verdict="alone")
    findings: tuple[Finding, ...] = ()
    if group.tensors or group.values or group.evidence.normalized or group.shards or group.ties:
        from syncheck.diagnose import diagnose  # thirty modules, needed only for differences

        # A folder may hold final files beside a history that includes their step.
        is_last = bool(run) and run[-1].step == group.step
        findings = diagnose(comparison, (*run[:-1], comparison) if is_last else (), allow)
    return with_findings(group, findings)


def with_findings(group: Group, findings: tuple[Finding, ...]) -> Group:
    """Return a group of several replicas with other findings, and the verdict that they imply."""
    verdict: Verdict = "in_sync"
    if any(finding.fails for finding in findings):
        verdict = "out_of_sync"
    elif not _count_compared(group) or group.uncompared or any(diff.unknown for diff in group.tensors):
        verdict = "undecided"
    return replace(group, findings=findings, verdict=verdict)


def _count_compared(group: Group) -> int:
    """Return the number of compared tensors, without optimizer step counters, which are equal for different models."""
    return sum(counts.compared for kind, counts in group.kinds.items() if kind != "optimizer_step")


def combine_verdicts(groups: Sequence[Group], unreadable: Sequence[Unreadable]) -> Verdict:
    """Return the verdict on all groups: in sync only if every group is in sync and every file could be read.

    A checkpoint without a replica is a group of its own, and makes the verdict undecided.
    """
    found = {group.verdict for group in groups}
    if "out_of_sync" in found:
        return "out_of_sync"
    return "in_sync" if found == {"in_sync"} and not unreadable else "undecided"
