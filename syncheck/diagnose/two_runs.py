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
    conditions = {
        "SYN106": True,
        # Two files of unknown steps are usually of different steps, so that their counters show no skipped step.
        "SYN214": case.group.evidence.stores_progress,
    }
    # A schedule changes the settings from step to step.
    are_steps_equal = case.agrees("optimizer_step")
    return conditions.get(code, are_steps_equal)


def limit_certainty(code: str, match: Match, case: Case) -> tuple[Certainty, tuple[str, ...]]:
    """Return the certainty of a cause of two runs, and its alternatives."""
    is_certain = match.certainty != "consistent"
    if is_certain and _is_likely(code, case):
        return "likely", match.alternatives
    usual_alternatives = _ALTERNATIVES[code]
    # Each code once, the codes of the rule first.
    alternatives = dict.fromkeys((*usual_alternatives, *match.alternatives))
    first_alternatives = tuple(alternatives)[:_MOST_ALTERNATIVES]
    return "consistent", first_alternatives


def _is_likely(code: str, case: Case) -> bool:
    """Whether the files show that both runs took the same steps, so that the cause is the likely one."""
    are_steps_counted = case.counts_steps()
    shows_equal_steps = {
        "SYN107": are_steps_counted or case.group.evidence.stores_progress,
        # Moments with the same direction need the same data, and without counters a skipped step looks the same.
        "SYN213": are_steps_counted,
    }
    return shows_equal_steps.get(code, False)
