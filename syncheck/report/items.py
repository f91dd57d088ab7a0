"""Units of judgement: kinds of tensors grouped into test items of pytest and test cases of JUnit."""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def item_of(kind: str) -> str:
    """Return the item of a kind of tensor."""
    return ITEMS.get(kind, kind)


def findings_of_item(group: Group, item: str, siblings: Sequence[str]) -> list[Finding]:
    """Return the findings on the tensors or values of an item.

    siblings: all items of the group. A finding without an item is reported by all items, because a failing
    finding must fail some test; an informational finding is then reported by the first item only.
    """
    kinds = {diff.name: diff.kind for diff in group.tensors}
    findings = []
    for finding in group.findings:
        affected = {item_of(kinds[name]) for name in finding.tensors if name in kinds}
        if finding.values:
            affected.add(VALUES)
        affected &= set(siblings)
        fallback = siblings[:1] if finding.severity == "info" else siblings
        if item in (affected or fallback):
            findings.append(finding)
    return findings
