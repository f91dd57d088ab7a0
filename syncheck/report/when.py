"""When a finding came about: a sentence for people, from the record of its run's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncheck.errors import one_line
from syncheck.report import words

if TYPE_CHECKING:
    from syncheck.records import Finding, History

# Steps that are named one by one.
_MOST_STEPS = 3


def sentence(finding: Finding) -> str:
    """Say since when, where it began, and how the gap went on; empty where one step was compared."""
    history = finding.history
    if history is None:
        return ""
    return "; ".join(part for part in (_began(history), _again(history), _gap(history)) if part)


def short(finding: Finding) -> str:
    """Say since when, and which way it goes; empty where one step was compared."""
    history = finding.history
    if history is None:
        return ""
    return _since(history) + (f", {history.trend}" if history.trend else "")


def number(gap: float | None) -> str:
    """Write a gap as people read it; a dash where no number tells it."""
    return "-" if gap is None else f"{gap:.3g}"


def _since(history: History) -> str:
    if history.agreed is None:
        return f"out of sync since the first step compared ({history.since})"
    return f"in sync until step {history.agreed}, out from step {history.since}"


def _began(history: History) -> str:
    count = len(history.tensors)
    if not count:
        return _since(history)
    first = one_line(history.tensors[0])
    tensors = f"first tensor {first}" if count == 1 else f"first {count} tensors, among them {first},"
    return f"{_since(history)}, {tensors} on {words.named(history.ranks)}"


def _again(history: History) -> str:
    """Name the steps in between at which its tensors agreed: what comes and goes has other causes than what stays."""
    steps = [str(point.step) for point in history.points if point.step > history.since and not point.differing]
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"in sync again at step{'s' * (len(steps) > 1)} {', '.join(steps[:_MOST_STEPS])}{more}" if steps else ""


def _gap(history: History) -> str:
    """Write the largest gap where it began and at the last step."""
    apart = [point for point in history.points if point.step >= history.since]
    first, last = apart[0], apart[-1]
    if first.max_abs is None and last.max_abs is None:
        return ""
    numbers = ["not known" if point.max_abs is None else number(point.max_abs) for point in (first, last)]
    gap = numbers[0] if len(apart) == 1 else " -> ".join(numbers)
    return f"gap {gap}" + (f", {history.trend}" if history.trend else "")
