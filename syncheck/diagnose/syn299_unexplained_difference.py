"""Replicas differ in a way that no rule explains.

Signature: what is left when every other rule has taken what it fits.

Cause: not known. The most common reasons for differing parameters are gradients that were not reduced, a model that
was not broadcast before training, and state that was loaded on some ranks only.

Fix: look at which ranks agree and which tensors differ (`--format json` lists them all), and save at two early steps:
a difference that stays constant comes from the start, one that grows comes from every step.

Incidents: a report with the JSON attached is welcome: every rule here began as an unexplained difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.diagnose.case import Match, agreement_text, gap_text, names_text, worst
from syncheck.suspects import suspects

if TYPE_CHECKING:
    from syncheck.diagnose.case import Case
    from syncheck.records import Severity

CODE = "SYN299"
SLUG = "unexplained-difference"
SEVERITY: Severity = "error"
CAUSE = (
    "No rule explains this difference. Often gradients were not reduced, the initial model was not broadcast, "
    "or state was loaded on some ranks only."
)
FIX = (
    "See which ranks agree, and compare two early steps: a constant difference comes from the start, a "
    "growing one from every step."
)


def apply(case: Case) -> Match | None:
    """Cover all that is left."""
    if not case.tensors and not case.values:
        return None
    parts = []
    if case.tensors:
        by_kind: dict[str, int] = {}
        for diff in case.tensors:
            by_kind[diff.kind] = by_kind.get(diff.kind, 0) + 1
        kinds = ", ".join(f"{count} {kind} tensor{'s' * (count != 1)}" for kind, count in by_kind.items())
        verb = "differs" if len(case.tensors) == 1 else "differ"
        parts.append(f"{kinds} {verb}, {gap_text(worst(case.tensors))}{agreement_text(case.tensors, case.group)}")
    if case.values:
        parts.append(f"values differ: {names_text(case.values)}")
    return Match(case.tensors, suspects(case.tensors, case.group), "; ".join(parts), case.values)
