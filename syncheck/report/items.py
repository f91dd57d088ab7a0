"""Units of judgement: kinds of tensors grouped into test items of pytest and test cases of JUnit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from syncheck.records import Counts, Report
from syncheck.report import finding_text, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, Group, Verdict

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
    item_of_tensor = {diff.name: item_of(diff.kind) for diff in group.tensors}
    findings = []
    for finding in group.findings:
        affected = {item_of_tensor[name] for name in finding.tensors if name in item_of_tensor}
        if finding.values:
            affected.add(VALUES)
        affected &= set(siblings)
        if not affected:
            affected = set(siblings[:1] if finding.severity == "info" else siblings)
        if item in affected:
            findings.append(finding)
    return findings


def judge_item(group: Group, item: str, siblings: Sequence[str]) -> tuple[Group, str]:
    """Return the part of a group that belongs to an item, and why this part has no verdict; "" if it has one.

    siblings: all items of the group.
    """
    kinds = {kind: counts for kind, counts in group.kinds.items() if item_of(kind) == item}
    findings = findings_of_item(group, item, siblings)
    part = replace(
        group,
        kinds=kinds,
        tensors=tuple(diff for diff in group.tensors if diff.kind in kinds or item == NOTHING),
        findings=tuple(findings),
        counts=sum(kinds.values(), Counts()),
        values=group.values if item == VALUES else (),
    )
    if any(finding.fails for finding in findings):
        return replace(part, verdict="out_of_sync"), ""
    reason = _undecided_reason(part, is_values=item == VALUES)
    verdict: Verdict = "undecided" if reason else "in_sync"
    return replace(part, verdict=verdict), reason


def headline(findings: Sequence[Finding]) -> str:
    """Return one line about findings: the first, and the codes of the rest."""
    first, *others = findings
    title = finding_text.finding_title(first)
    if others:
        title += f" (and {', '.join(finding.code for finding in others[:_MOST_CODES])})"
    return f"{title}: {first.evidence}"


def _undecided_reason(part: Group, *, is_values: bool) -> str:
    """Return why a part without failing findings has no verdict; empty if it has one."""
    unknown = sum(diff.unknown and diff.reason == "checksum" for diff in part.tensors)
    if unknown:
        return f"{unknown} of {part.counts.tensors} tensors have no usable stored checksum"
    if not is_values and not part.counts.compared:
        return _describe_uncompared(part)
    evidence = part.evidence
    has_uncompared_tensor = part.is_pair and any(diff.uncompared for diff in part.tensors)
    if evidence.inferred or evidence.guessed or has_uncompared_tensor:
        return str(words.undecided_reason(Report("undecided", (part,), command="diff")))
    if part.verdict == "undecided":
        return "too few tensors of this group were compared for a verdict"
    return ""


def _describe_uncompared(part: Group) -> str:
    """Return the most common reasons of a part without a compared tensor."""
    reasons: Counter[str] = Counter()
    for diff in part.tensors:
        reasons[f"{diff.reason}: {diff.detail}" if diff.detail else str(diff.reason)] += 1
    if not reasons:
        return "no tensor was compared; options may exclude all"
    details = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(_MOST_REASONS))
    return f"no tensor was compared ({details})"
