"""Causes of `syncheck compare` that also explain how two runs differ, if both models have the state of an optimizer.

Replicas of one run must agree, so a deviation is a fault. Two runs may differ for any reason, so
that the evidence suggests a cause and proves nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syncheck.diagnose.case import Case, Match
    from syncheck.findings import Certainty

# Other causes with the same evidence.
_ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "SYN106": ("SYN107", "SYN213"),
    "SYN214": ("SYN106",),
    "SYN107": ("SYN106",),
    "SYN213": ("SYN107",),
}
CODES = frozenset(_ALTERNATIVES)
# The length of the list in a finding.
_MOST_ALTERNATIVES = 3


def may_explain(code: str, case: Case) -> bool:
    """Whether a rule for replicas may explain the differences of two models."""
    if not case.compared("optimizer"):
        return False
    if code == "SYN106":
        return True
    # Two files of unknown steps are usually of different steps, so that their counters show no skipped step.
    if code == "SYN214":
        return case.group.evidence.stores_progress
    # A schedule changes the settings from step to step.
    return case.agrees("optimizer_step")


def limit_certainty(code: str, match: Match, case: Case) -> tuple[Certainty, tuple[str, ...]]:
    """Return the certainty of a cause of two runs, and its alternatives."""
    if match.certainty != "consistent" and _is_likely(code, case):
        return "likely", match.alternatives
    alternatives = dict.fromkeys((*_ALTERNATIVES[code], *match.alternatives))
    return "consistent", tuple(alternatives)[:_MOST_ALTERNATIVES]


def _is_likely(code: str, case: Case) -> bool:
    """Whether the files show that both runs took the same steps, so that the cause is the likely one."""
    if code not in ("SYN107", "SYN213"):
        return False
    if case.counts_steps():
        return True
    # Moments with the same direction need the same data, and without counters a skipped step looks the same.
    return code == "SYN107" and case.group.evidence.stores_progress
