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
    verdict, failing = check.verdict, [finding.code for finding in check.findings if finding.fails]
    softened = [finding.code for finding in check.findings if _is_softened(finding)]
    allowed = [finding.code for finding in check.findings if finding.allowed]
    differing = [diff.name for diff in check.tensors if diff.out_of_sync]
    different = check.counts.different + len(differing)
    # An allowed finding explains differences in a check in sync; nothing else does.
    problems = {
        f"severity info contradicts the code {', '.join(softened)}": bool(softened),
        f"verdict {verdict} contradicts the finding {', '.join(failing)}": bool(failing) and verdict != "out_of_sync",
        "verdict out_of_sync has no finding that fails": verdict == "out_of_sync" and not failing,
        f"verdict {verdict} contradicts tensors that differ": bool(different) and not (failing or allowed),
        "verdict in_sync, although no tensor was compared": verdict == "in_sync" and not check.counts.compared,
    }
    return _find_wrong_count(check, event) or _first_problem(problems)


def find_contradicted_check(event: Mapping[str, Any], check: Group | None) -> str:
    """Return why an event `desync` or `end` contradicts the check before it, or an empty text."""
    if check is None:
        return ""
    verdict = event.get("verdict")
    problems = {}
    if event["event"] == "end":
        # A monitor that never checked has no verdict.
        contradicts = verdict is not None and verdict != check.verdict
        problems[f"event end with verdict {verdict}, but the last check is {check.verdict}"] = contradicts
    elif event["step"] == check.step:
        codes = {str(finding["code"]) for finding in event["findings"]}
        missing = sorted(codes - {finding.code for finding in check.findings})
        problems[f"event desync, but the check is {check.verdict}"] = check.verdict != "out_of_sync"
        problems[f"event desync with {', '.join(missing)}, which the check does not have"] = bool(missing)
    return _first_problem(problems)


def _first_problem(problems: Mapping[str, bool]) -> str:
    """Return the first text whose condition holds, or an empty text."""
    return next((text for text, holds in problems.items() if holds), "")


def _find_wrong_count(check: Group, event: Mapping[str, Any]) -> str:
    """Return which number of tensors is negative or contradicts the other numbers, or an empty text."""
    totals = int(event["tensors"]), int(event["compared"])
    problems = {
        f"{totals[1]} of {totals[0]} tensors compared contradicts the counts by kind": totals
        != (check.counts.tensors, check.counts.compared)
    }
    for kind, counts in check.kinds.items():
        numbers = [getattr(counts, part.name) for part in fields(Counts)]
        # The first number is the sum of the others.
        results = sum(numbers) - counts.tensors
        problems[f"a negative number of tensors of kind {kind:.40}"] = min(numbers) < 0
        problems[f"{counts.tensors} tensors of kind {kind:.40}, but {results} results"] = results != counts.tensors
    return _first_problem(problems)


def _is_softened(finding: Finding) -> bool:
    """Whether a finding claims to be mere information, but its code never is. Later versions may have more codes."""
    if finding.severity != "info":
        return False
    from syncheck.diagnose import RULES  # 30 modules, only needed for events with findings of severity info

    severities = {rule.CODE: rule.SEVERITY for rule in RULES}
    return severities.get(finding.code, "info") != "info"
