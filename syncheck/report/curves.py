"""How far apart the tensors of each finding were at each step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.messages import ranks_text

if TYPE_CHECKING:
    from syncheck.records import Group

# Lines that can be told apart.
MOST_FINDINGS = 6

Curve = tuple[tuple[int, float | None], ...]


def curves(group: Group) -> dict[str, Curve]:
    """Return the largest gap of each finding at every step: 0.0 where all agreed, None where no number tells it.

    group: of a run's last step. Findings without a history have no curve.
    """
    told = [(finding, finding.history) for finding in group.findings if finding.history is not None]
    return {
        f"{finding.code} on {ranks_text(finding.ranks)}": tuple((point.step, point.max_abs) for point in history.points)
        for finding, history in told[:MOST_FINDINGS]
    }
