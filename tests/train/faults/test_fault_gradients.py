"""What syncheck says of unequal starts and gradients in real runs: the finding and the suspects, with SGD too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import QUIET
from scenarios import run

import syncheck
from syncheck.diagnose.gradients import Course
from train.faults import FAULTS

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

SGD = replace(QUIET, optimizer="sgd", lr=0.1, max_steps=8)
# On which of three ranks: all of them where each has gradients of its own.
SUSPECTS = {
    "init-not-broadcast": (2,),
    "forward-through-module": (0, 1, 2),
    "late-head": (0, 1, 2),
    "clip-on-one-rank": (2,),
    "frozen-not-broadcast": (2,),
}


@pytest.mark.syncheck(ranks=3, timeout=60)
@pytest.mark.parametrize("fault", SUSPECTS)
def test_the_finding_is_the_only_one(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """With SGD's weight decay, momentum and plain BatchNorm, one finding takes all that differs, with its suspects.

    If one rank is odd, the statistics of the other ranks are their own matter.
    """
    settings = replace(SGD, fault=fault, sync_bn=False, out=syncheck_rank.shared)
    run(ctx, settings)
    (group,) = syncheck.compare(settings.out).groups
    found = [(finding.code, finding.ranks) for finding in group.findings]
    rest = [("SYN201", (0, 1))] if len(SUSPECTS[fault]) == 1 else []
    assert found == [(FAULTS[fault].code, SUSPECTS[fault]), *rest]


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", ["init-not-broadcast", "forward-through-module", "late-head"])
def test_the_gap_over_the_steps(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """An unequal start leaves a constant gap, and gradients of each rank's own one that grows."""
    settings = replace(SGD, fault=fault, save_every=2, out=syncheck_rank.shared)
    run(ctx, settings)
    report = syncheck.compare(settings.out / "history")
    codes = {finding.code for group in report.groups for finding in group.findings}
    assert codes == {FAULTS[fault].code}
    (finding,) = report.groups[-1].findings
    assert finding.history is not None
    assert finding.history.since == 2
    facts = {fact.code: fact.parameters for fact in finding.facts}
    assert facts[Course.UNCHANGED if fault == "init-not-broadcast" else Course.GREW]["step"] == 2
