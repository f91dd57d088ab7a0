"""Check that the event of a monitor agrees with itself: its verdict follows from its findings and counts.

Whoever edits an event file, or damages it, must not turn a run out of sync into exit code 0.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from syncheck.records import Counts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.records import Finding, Group


def find_contradiction(check: Group, event: Mapping[str, Any]) -> str:
    """Return a contradiction within a check, or an empty text.

    check: made from the event.
    """
    counts = _find_wrong_count(check, event)
    if counts:
        return counts
    for finding in check.findings:
        if finding.severity == "info" and _must_fail(finding):
            return f"severity info contradicts {finding.code}, which is a warning or an error"
    failing = [finding.code for finding in check.findings if finding.fails]
    if failing and check.verdict != "out_of_sync":
        return f"verdict {check.verdict} contradicts the finding {failing[0]}"
    if not failing and check.verdict == "out_of_sync":
        return "verdict out_of_sync has no finding that fails"
    differing = check.counts.different or any(diff.out_of_sync for diff in check.tensors)
    explained = any(finding.allowed or finding.fails for finding in check.findings)
    if differing and not explained:
        return f"verdict {check.verdict} contradicts the tensors that differ"
    if check.verdict == "in_sync" and not check.counts.compared:
        return "verdict in_sync, although no tensor was compared"
    return ""


def find_contradicted_check(event: Mapping[str, Any], check: Group | None) -> str:
    """Return why an event `desync` or `end` contradicts the check before it, or an empty text."""
    if event["event"] == "desync":
        if check is None or check.step != event["step"]:
            return ""
        codes = [str(finding["code"]) for finding in event["findings"]]
        missing = sorted(set(codes) - {finding.code for finding in check.findings})
        if missing:
            return f"event desync with {missing[0]}, which the check of step {check.step} does not have"
        return "" if check.verdict == "out_of_sync" else f"event desync, but step {check.step} is {check.verdict}"
    verdict = event.get("verdict")
    if check is not None and verdict is not None and verdict != check.verdict:
        return f"event end with verdict {verdict}, but the last check is {check.verdict}"
    return ""


def _find_wrong_count(check: Group, event: Mapping[str, Any]) -> str:
    """Return which number of tensors is negative or contradicts the other numbers, or an empty text."""
    for kind, counts in check.kinds.items():
        numbers = {part.name: getattr(counts, part.name) for part in fields(Counts)}
        negative = [name for name, number in numbers.items() if number < 0]
        if negative:
            return f"a negative count, {negative[0]} of kind {kind:.40}"
        parts = sum(numbers.values()) - counts.tensors
        if parts != counts.tensors:
            return f"{counts.tensors} tensors of kind {kind:.40}, but {parts} results"
    totals = (int(event["tensors"]), int(event["compared"]))
    if totals != (check.counts.tensors, check.counts.compared):
        return f"{totals[1]} of {totals[0]} tensors compared contradicts the counts by kind"
    return ""


def _must_fail(finding: Finding) -> bool:
    """Whether a finding with this code is never mere information. Codes of later versions are unknown here."""
    from syncheck.diagnose import RULES  # 30 modules, only needed for events with findings of severity info

    return any(finding.code == rule.CODE and rule.SEVERITY != "info" for rule in RULES)
