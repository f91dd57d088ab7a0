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


def may_explain(code: str, case: Case) -> bool:
    """Whether a rule for replicas may explain the differences of two models."""
    if not case.compared("optimizer"):
        return False
    # Two files of unknown steps are usually of different steps, so that their counters show no skipped step.
    if code == "SYN214":
        return case.group.evidence.stores_progress
    # A schedule changes the settings from step to step.
    return code == "SYN106" or case.agrees("optimizer_step")


def limit_certainty(code: str, match: Match, case: Case) -> tuple[Certainty, tuple[str, ...]]:
    """Return the certainty of a cause of two runs, and its alternatives."""
    is_likely = False
    if code == "SYN107":
        is_likely = case.counts_steps() or case.group.evidence.stores_progress
    if code == "SYN213":
        # Moments with the same direction need the same data, and without counters a skipped step looks the same.
        is_likely = case.counts_steps()
    if is_likely and match.certainty != "consistent":
        return "likely", match.alternatives
    # At most three codes.
    return "consistent", tuple(dict.fromkeys((*_ALTERNATIVES[code], *match.alternatives)))[:3]
