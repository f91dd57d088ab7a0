"""Units of judgement: kinds of tensors grouped into test items of pytest and test cases of JUnit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.diagnose.selection import select_names
from syncheck.records import Counts, Report
from syncheck.report import finding_text
from syncheck.report.selections import find_failing, list_codes
from syncheck.report.undecided import undecided_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, Group

# Item of each kind; other kinds have an item of the same name.
ITEMS = {
    "parameter": "parameters",
    "bn_mean": "bn-stats",
    "bn_var": "bn-stats",
    "bn_count": "bn-stats",
    "buffer": "buffers",
    "optimizer_step": "optimizer",
    "value": "values",
}
VALUES = "values"
# Items without a kind: a file without a replica, a group without tensors to compare, and an unreadable file.
ALONE, NOTHING, READABLE = "replicas", "tensors", "readable"
_MOST_REASONS = 3
_MOST_CODES = 3


def item_of(kind: str) -> str:
    """Return the item of a kind of tensor."""
    return ITEMS.get(kind, kind)


def findings_of_item(group: Group, item: str, siblings: Sequence[str]) -> list[Finding]:
    """Return the findings on the tensors or values of an item.

    siblings: all items of the group. A finding without an item is reported by all items, because a failing
    finding must fail some test; an informational finding is then reported by the first item only.
    """
    findings = []
    for finding in group.findings:
        tensors = select_names(group.tensors, frozenset(finding.tensors))
        affected = {item_of(diff.kind) for diff in tensors}
        if finding.values:
            affected.add(VALUES)
        affected.intersection_update(siblings)
        default = siblings[:1] if finding.severity == "info" else siblings
        if item in (affected or default):
            findings.append(finding)

    return findings


def judge_item(group: Group, item: str, siblings: Sequence[str]) -> tuple[Group, str]:
    """Return the part of a group that belongs to an item, and why this part has no verdict; "" if it has one.

    siblings: all items of the group.
    """
    part = _select_part(group, item, siblings)
    if find_failing(part.findings):
        return replace(part, verdict="out_of_sync"), ""
    reason = _undecided_reason(part, is_values=item == VALUES)
    if reason:
        return replace(part, verdict="undecided"), reason
    return replace(part, verdict="in_sync"), ""


def _select_part(group: Group, item: str, siblings: Sequence[str]) -> Group:
    """Return the part of a group that belongs to an item, with the verdict of the group."""
    kinds = {kind: counts for kind, counts in group.kinds.items() if item_of(kind) == item}
    tensors = group.tensors
    if item != NOTHING:
        tensors = tuple(diff for diff in group.tensors if diff.kind in kinds)

    return replace(
        group,
        kinds=kinds,
        tensors=tensors,
        findings=tuple(findings_of_item(group, item, siblings)),
        counts=sum(kinds.values(), Counts()),
        values=group.values if item == VALUES else (),
    )


def headline(findings: Sequence[Finding]) -> str:
    """Return one line about findings: the first, and the codes of the rest."""
    first = findings[0]
    title = finding_text.finding_title(first)
    further_codes = list_codes(findings[1 : _MOST_CODES + 1])
    if further_codes:
        title += f" (and {', '.join(further_codes)})"
    return f"{title}: {first.evidence}"


def _undecided_reason(part: Group, *, is_values: bool) -> str:
    """Return why a part without failing findings has no verdict; empty if it has one."""
    unknown = [diff for diff in part.tensors if diff.unknown and diff.reason == "checksum"]
    if unknown:
        return f"{len(unknown)} of {part.counts.tensors} tensors have no usable stored checksum"
    if not is_values and not part.counts.compared:
        return _describe_uncompared(part)
    if _is_unproven(part):
        return str(undecided_reason(Report("undecided", (part,), command="diff")))
    if part.verdict == "undecided":
        return "too few tensors of this group were compared for a verdict"
    return ""


def _is_unproven(part: Group) -> bool:
    """Whether equal tensors of two models rest on a guess, or a tensor of them could not be compared."""
    if part.evidence.inferred or part.evidence.guessed:
        return True
    return part.is_pair and any(diff.uncompared for diff in part.tensors)


def _describe_uncompared(part: Group) -> str:
    """Return the most common reasons of a part without a compared tensor."""
    if not part.tensors:
        return "no tensor was compared; options may exclude all"

    reasons: Counter[str] = Counter()
    for diff in part.tensors:
        reason = str(diff.reason)
        if diff.detail:
            reason += f": {diff.detail}"
        reasons[reason] += 1

    details = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(_MOST_REASONS))
    return f"no tensor was compared ({details})"
