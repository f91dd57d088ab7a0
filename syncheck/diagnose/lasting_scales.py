"""Recognize gradients that some ranks scale at every step from some step on, by SGD's momenta at several steps.

SGD counts no steps, so at one step a scale, a skipped step and a lost momentum look alike, and a hard clip turns the
momenta so far that they look like gradients of the rank's own. Several steps tell them apart: after a single event, the
lengths of the momenta become equal again, and a scale below 1 makes them shorter and shorter. Measured on three ranks,
up to 20 steps after the start: a clip reached 0.1 to 0.4 times the length, in all tensors. Skipped steps and a lost
momentum returned to 0.9 to 1, gradients of the rank's own and noise made the momenta longer, and masks reached 0.63.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from syncheck.diagnose.measures import evidence_of, median
from syncheck.diagnose.optimizer_names import is_momentum
from syncheck.diagnose.selection import out_of_sync, ranks_outside
from syncheck.messages import Sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from syncheck.messages import Message
    from syncheck.records import Finding, Group

# Findings that a scale at several steps explains better.
CODES = frozenset({"SYN211", "SYN213", "SYN299"})
# The largest median length at the last step, the largest multiple of the first step, the room for a step in between,
# and the least share of shorter tensors.
SHORT, SHRUNK, ROOM, ONE_SIDE = 0.5, 0.75, 1.1, 0.95


class Scale(Sentence):
    """Statements about gradients that some ranks scale."""

    SHORTENS = (
        "the momenta of {ranks:ranks} become shorter and shorter: {first:.3g} times as long as on {reference:ranks} at "
        "step {start}, and {last:.3g} times at step {end}"
    )


class _Lengths(NamedTuple):
    """The momenta of the suspects at one step, as multiples of the lengths on another rank. step: None if unknown."""

    step: int | None
    factors: list[float]

    @property
    def typical(self) -> float:
        """The median."""
        return median(self.factors)


def describe_scale(steps: Sequence[Group], findings: Sequence[Finding]) -> Message | None:
    """State that some ranks scale their gradients, if the momenta of several steps show it, else return None.

    steps: the groups of the findings, in their order.
    """
    ranks = findings[-1].ranks
    majority = ranks_outside(steps[-1].ranks, ranks)
    # Of two ranks, nothing shows which rank deviates.
    if not majority or not CODES.issuperset(finding.code for finding in findings):
        return None
    measured = []
    for group in steps:
        lengths = _measure(group, ranks, majority[0])
        if lengths.factors:
            measured.append(lengths)
    if not _are_shrinking(measured):
        return None
    first, last = measured[0], measured[-1]
    return Scale.SHORTENS(
        ranks=ranks,
        reference=majority,
        first=first.typical,
        start=first.step,
        last=last.typical,
        end=last.step,
    )


def _measure(group: Group, ranks: Sequence[int], reference: int) -> _Lengths:
    """Return the lengths of the differing momenta of some ranks. reference: the rank to compare with."""
    factors = []
    for diff in out_of_sync(group):
        norms = evidence_of(diff).norms
        reference_norm = norms.get(reference, 0.0)
        # Tensors of one element have no direction, and the momentum of unused parameters is zero.
        exceptions = (not is_momentum(diff.name), diff.numel < 2, reference_norm == 0)
        if any(exceptions):
            continue
        for rank in norms.keys() & set(ranks):
            factor = norms[rank] / reference_norm
            factors.append(factor)
    return _Lengths(group.step, factors)


def _are_shrinking(measured: Sequence[_Lengths]) -> bool:
    """Whether the momenta become shorter over several steps, until nearly all of them are short."""
    if len(measured) < 2:
        return False
    first, last = measured[0], measured[-1]
    # Nearly all factors below 1.
    position = int((1 - ONE_SIDE) * len(last.factors))
    conditions = (
        last.typical <= SHORT,
        last.typical <= SHRUNK * first.typical,
        sorted(last.factors, reverse=True)[position] < 1,
        all(later.typical <= ROOM * earlier.typical for earlier, later in pairwise(measured)),
    )
    return all(conditions)
