"""What of a group is judged together: kinds of tensors, as test items of pytest and as test cases of JUnit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, Group

# What is judged by one item, by kind; a kind that is not named here has an item of its own name.
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
# Items that stand for no kind: a file that no other is a replica of, a group of which nothing is left to compare, and
# a file that cannot be read.
ALONE, NOTHING, READABLE = "replicas", "tensors", "readable"


def item_of(kind: str) -> str:
    """Name the item that judges a kind of tensor."""
    return ITEMS.get(kind, kind)


def concerning(group: Group, item: str, siblings: Sequence[str]) -> list[Finding]:
    """Return the findings that an item has to tell: those on a tensor or value of its own.

    siblings: all items of the group. A finding on nothing that any of them judges is told by all of them: one that
    fails must fail something. One that only informs is told once then, by the first.
    """
    kinds = {diff.name: diff.kind for diff in group.tensors}
    told = []
    for finding in group.findings:
        concerned = {item_of(kinds[name]) for name in finding.tensors if name in kinds}
        if finding.values:
            concerned.add(VALUES)
        concerned &= set(siblings)
        others = siblings[:1] if finding.severity == "info" else siblings
        if item in (concerned or others):
            told.append(finding)
    return told
