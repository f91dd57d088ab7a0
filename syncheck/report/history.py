"""Text about the history of a finding: since which step, and how the difference developed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.errors import one_line
from syncheck.report import words

if TYPE_CHECKING:
    from syncheck.records import Finding, History

# Steps listed individually.
_MOST_STEPS = 3


def describe_history(finding: Finding) -> str:
    """Return first step, first tensors, steps in sync again and differences; empty without a history."""
    history = finding.history
    if history is None:
        return ""
    return "; ".join(part for part in (_first_difference(history), _steps_in_sync(history), _range(history)) if part)


def summarize_history(finding: Finding) -> str:
    """Return the first step and the trend; empty without a history."""
    history = finding.history
    if history is None:
        return ""
    return _since(history) + (f", {history.trend}" if history.trend else "")


def difference_text(difference: float | None) -> str:
    """Return a difference with three digits, or a dash if it is unknown."""
    return "-" if difference is None else f"{difference:.3g}"


def _since(history: History) -> str:
    if history.agreed is None:
        return f"out of sync since the first step compared ({history.since})"
    return f"in sync until step {history.agreed}, out of sync from step {history.since}"


def _first_difference(history: History) -> str:
    count = len(history.tensors)
    if not count:
        return _since(history)
    first = one_line(history.tensors[0])
    tensors = f"first in {first}" if count == 1 else f"first in {count} tensors including {first}"
    return f"{_since(history)}, {tensors} on {words.ranks_label(history.ranks)}"


def _steps_in_sync(history: History) -> str:
    """Return later steps in sync: an intermittent difference has other causes than a permanent one."""
    steps = [str(point.step) for point in history.points if point.step > history.since and not point.differing]
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"in sync again at step{'s' * (len(steps) > 1)} {', '.join(steps[:_MOST_STEPS])}{more}" if steps else ""


def _range(history: History) -> str:
    """Return the largest difference at the first step out of sync and at the last step."""
    points = [point for point in history.points if point.step >= history.since]
    first, last = points[0], points[-1]
    if first.max_abs is None and last.max_abs is None:
        return ""
    ends = ["unknown" if point.max_abs is None else difference_text(point.max_abs) for point in (first, last)]
    difference = ends[0] if len(points) == 1 else " -> ".join(ends)
    return f"max abs difference {difference}" + (f", {history.trend}" if history.trend else "")
