"""Tell a single event from a fault of every step, by the first moments at several steps.

After a single step with wrong gradients, the first moments of the ranks converge again, because each new gradient is
equal. The parameters may still move apart. In the trials of the first part (docs/diagnosis-trials.md), the cosines rose
to 0.98 for events alone, except for summed gradients, whose scale is SYN213.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from syncheck.diagnose.measures import cosines
from syncheck.findings import FIRST_MOMENTS
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
        "Look for what happened on these ranks at the first differing step: `no_sync()` that ended late, a skipped "
        "all-reduce, an unused parameter, a hook, or a bad batch. Then resume from a checkpoint in which the ranks "
        "agree."
    )
    CONVERGED = (
        "the first moments converge, from a median cosine of {first:.2f} at step {start} to {last:.3f} at step {end}"
    )


def describe_events(steps: Sequence[Group], findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of one fault, with the cause of a single event if the first moments converge.

    steps: the groups of the findings, in their order.
    """
    measured = []
    for group in steps:
        moments = [diff for diff in group.tensors if diff.out_of_sync and diff.name.rpartition(".")[2] in FIRST_MOMENTS]
        values = cosines(moments)
        if values:
            measured.append((group.step, median(values)))
    if not _is_rising([cosine for _, cosine in measured]):
        return list(findings)
    (start, first), (end, last) = measured[0], measured[-1]
    fact = Event.CONVERGED(first=first, start=start, last=last, end=end)
    described = []
    for finding in findings:
        if finding.code in CODES:
            finding = replace(finding, facts=(*finding.facts, fact), cause=Event.CAUSE(), fix=Event.FIX())
        described.append(finding)
    return described


def _is_rising(measured: Sequence[float]) -> bool:
    """Whether the cosines of several steps rise to nearly 1."""
    if len(measured) < 2 or measured[-1] < CONVERGED or measured[-1] - measured[0] < LEAST_RISE:
        return False
    return all(later >= earlier - ROOM for earlier, later in pairwise(measured))
