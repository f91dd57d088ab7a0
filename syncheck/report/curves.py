"""How far apart the tensors of a finding were at each step of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.records import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncheck.records import Finding, Group, TensorDiff

# Lines that can be told apart.
MOST_FINDINGS = 6

Curve = tuple[tuple[int, float | None], ...]


def curves(groups: Sequence[Group]) -> dict[str, Curve]:
    """Return, for each finding of a run's last step, the largest gap of its tensors at every step.

    groups: of one run, steps in order. A step at which no number tells how far apart they are has None. Nothing is
    returned where there are fewer than two steps.
    """
    steps = [(group.step, {diff.name: diff for diff in group.tensors}) for group in groups]
    numbered = [(step, diffs) for step, diffs in steps if step is not None]
    if len(numbered) < 2:
        return {}
    told = [finding for finding in groups[-1].findings if finding.tensors][:MOST_FINDINGS]
    return {
        f"{finding.code} on {ranks_text(finding.ranks)}": tuple(
            (step, _largest(finding, diffs)) for step, diffs in numbered
        )
        for finding in told
    }


def _largest(finding: Finding, diffs: Mapping[str, TensorDiff]) -> float | None:
    apart = [diffs[name] for name in finding.tensors if name in diffs]
    if any(diff.out_of_sync and diff.max_abs is None for diff in apart):
        return None
    return max((float(diff.max_abs) for diff in apart if diff.max_abs is not None), default=0.0)
