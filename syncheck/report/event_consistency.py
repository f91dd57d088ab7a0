"""Check that the event of a monitor agrees with itself: its verdict follows from its findings and counts.

Whoever edits an event file, or damages it, must not turn a run out of sync into exit code 0.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from syncheck.diagnose.selection import select_out_of_sync

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from syncheck.records import Finding, Group


def find_contradiction(check: Group, event: Mapping[str, Any]) -> str:
    """Return a contradiction within a check, or an empty text.

    check: made from the event.
    """
    problems = {**_compare_counts(check, event), **_compare_verdict(check)}
    return _first_problem(problems)


def _compare_verdict(check: Group) -> dict[str, bool]:
    """Return the ways in which a verdict may contradict its findings and tensors, and whether it does."""
    verdict = check.verdict
    out_of_sync = verdict == "out_of_sync"
    codes: dict[str, list[str]] = defaultdict(list)
    for finding in check.findings:
        role = _find_role(finding)
        codes[role].append(finding.code)

    softened, failing = codes["softened"], codes["failing"]
    # An allowed finding explains differences in a check in sync; nothing else does.
    explaining = failing + codes["allowed"]
    differs = bool(check.counts.different or select_out_of_sync(check.tensors))
    # A check without compared tensors is undecided.
    unfounded = verdict == "in_sync" and not check.counts.compared
    return {
        f"severity info contradicts the code {', '.join(softened)}": bool(softened),
        f"verdict {verdict} contradicts the finding {', '.join(failing)}": bool(failing) and not out_of_sync,
        "verdict out_of_sync has no finding that fails": out_of_sync and not failing,
        f"verdict {verdict} contradicts tensors that differ": differs and not explaining,
        "verdict in_sync, although no tensor was compared": unfounded,
    }


def _find_role(finding: Finding) -> str:
    """Return what a finding means for the verdict of its check: softened, failing, allowed or neutral."""
    if _is_softened(finding):
        return "softened"
    if finding.fails:
        return "failing"
    if finding.allowed:
        return "allowed"
    return "neutral"


def find_contradicted_check(event: Mapping[str, Any], check: Group) -> str:
    """Return why an event `desync` or `end` contradicts the check before it, or an empty text."""
    if event["event"] == "end":
        return _first_problem(_compare_end(event, check))
    # An event `desync` belongs to the check of its step only.
    if event["step"] == check.step:
        return _first_problem(_compare_desync(event, check))
    return ""


def _compare_end(event: Mapping[str, Any], check: Group) -> dict[str, bool]:
    """Return how the end of a run may contradict its last check, and whether it does."""
    verdict = event.get("verdict")
    # A monitor that never checked has no verdict.
    contradicts = verdict not in (None, check.verdict)
    return {f"event end with verdict {verdict}, but the last check is {check.verdict}": contradicts}


def _compare_desync(event: Mapping[str, Any], check: Group) -> dict[str, bool]:
    """Return how an event `desync` may contradict the check of the same step, and whether it does."""
    missing_codes = {str(finding["code"]) for finding in event["findings"]}
    for finding in check.findings:
        missing_codes.discard(finding.code)
    return {
        f"event desync, but the check is {check.verdict}": check.verdict != "out_of_sync",
        f"event desync with {', '.join(sorted(missing_codes))}, which the check does not have": bool(missing_codes),
    }


def _first_problem(problems: Mapping[str, bool]) -> str:
    """Return the first text whose condition holds, or an empty text."""
    return next((text for text, holds in problems.items() if holds), "")


def _compare_counts(check: Group, event: Mapping[str, Any]) -> dict[str, bool]:
    """Return which numbers of tensors may be negative or contradict the other numbers, and whether they do."""
    tensors, compared = int(event["tensors"]), int(event["compared"])
    expected = (check.counts.tensors, check.counts.compared)
    sentence = f"{compared} of {tensors} tensors compared contradicts the counts by kind"
    problems = {sentence: (tensors, compared) != expected}
    for kind, counts in check.kinds.items():
        numbers = astuple(counts)
        # The first number is the sum of the others.
        results = sum(numbers) - counts.tensors
        problems[f"a negative number of tensors of kind {kind:.40}"] = min(numbers) < 0
        problems[f"{counts.tensors} tensors of kind {kind:.40}, but {results} results"] = results != counts.tensors

    return problems


def find_softened(findings: Iterable[Finding]) -> str:
    """Return which findings claim to be mere information, although their codes never are, or an empty text."""
    softened = [finding.code for finding in findings if _is_softened(finding)]
    return _first_problem({f"severity info contradicts the code {', '.join(softened)}": bool(softened)})


def _is_softened(finding: Finding) -> bool:
    """Whether a finding claims to be mere information, but its code never is. Later versions may have more codes."""
    if finding.severity != "info":
        return False

    from syncheck.diagnose.rules import list_rules  # 30 modules, only needed for events with findings of severity info

    for rule in list_rules():
        if rule.code == finding.code:
            return rule.severity != "info"

    return False
