"""Tell a single event from a fault of every step, by the first moments at several steps.

After a single step with wrong gradients, the first moments of the ranks converge again, because each new gradient is
equal. The parameters may still move apart. In the trials of the first part (docs/diagnosis-trials.md), the cosines rose
to 0.98 for events alone, except for summed gradients, whose scale is SYN213.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import median_cosine
from syncheck.diagnose.optimizer_names import is_gradient_average
from syncheck.diagnose.selection import out_of_sync
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.records import Finding, Group

# Findings whose cause would go on, or is unknown.
CODES = frozenset({"SYN211", "SYN299"})
# The last cosine, the least rise since the first, and the room for rounding in between.
CONVERGED, LEAST_RISE, ROOM = 0.98, 0.01, 0.001


class Event(Sentence):
    """The sentences of a single event."""

    CAUSE = (
        "The gradients of the ranks differed at one step or a few steps, and have been equal since: no average "
        "there, or a rank changed its own."
    )
    FIX = (
        "Look for events on these ranks at the first differing step: `no_sync()` that ended late, a skipped "
        "all-reduce, an unused parameter, a hook, or a bad batch. Then resume from a checkpoint in which the ranks "
        "agree."
    )
    CONVERGED = (
        "the first moments converge, from a median cosine of {first:.2f} at step {start} to {last:.3f} at step {end}"
    )


class _Measurement(NamedTuple):
    """The median cosine of the differing first moments at one step."""

    step: int | None
    cosine: float


def describe_events(steps: Sequence[Group], findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of one fault, with the cause of a single event if the first moments converge.

    steps: the groups of the findings, in their order.
    """
    measured = _measure(steps)
    # At every step, wrong gradients keep the first moments apart.
    if not _is_rising(measured):
        return list(findings)
    first, last = measured[0], measured[-1]
    fact = Event.CONVERGED(
        first=first.cosine,
        start=first.step,
        last=last.cosine,
        end=last.step,
    )
    described = []
    for finding in findings:
        if finding.code in CODES:
            finding = replace(
                finding,
                facts=(*finding.facts, fact),
                cause=Event.CAUSE(),
                fix=Event.FIX(),
            )
        described.append(finding)
    return described


def _measure(steps: Sequence[Group]) -> list[_Measurement]:
    """Return the median cosine of the first moments at each step with a cosine."""
    measured = []
    for group in steps:
        moments = [diff for diff in out_of_sync(group) if is_gradient_average(diff.name)]
        cosine = median_cosine(moments)
        if cosine is not None:
            measured.append(_Measurement(group.step, cosine))
    return measured


def _is_rising(measured: Sequence[_Measurement]) -> bool:
    """Whether the cosines of several steps rise to nearly 1."""
    if len(measured) < 2:
        return False
    first, last = measured[0].cosine, measured[-1].cosine
    if last < CONVERGED or last - first < LEAST_RISE:
        return False
    # Allow for rounding between two steps.
    return all(later.cosine >= earlier.cosine - ROOM for earlier, later in pairwise(measured))
