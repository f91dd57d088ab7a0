"""Faults in complete runs: the rank that differs, its finding, and faults beside micro-batches and overflows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import NEEDS, QUIET, unlike
from scenarios import run, tensors

import syncheck
from syncheck.diagnose.case import Course
from train.errors import UserError
from train.faults import FAULTS
from train.faults.batchnorm import BatchNormFault

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

STATISTICS = ("running_mean", "running_var")
# Faults of all ranks; differs-by-node needs four ranks.
EVERY_RANK = {"buffers-never-synced", "forward-through-module", "late-head", "differs-by-node", "local-normalizer"}
# One fault of each kind by default: at the start, in memory, in the reduction, in the files.
BY_DEFAULT = {"frozen-not-broadcast", "bit-flip-weight", "clip-on-one-rank", "stale-rank"}
ODD = [
    pytest.param(fault, marks=() if fault in BY_DEFAULT else pytest.mark.slow)
    for fault in sorted(set(FAULTS) - EVERY_RANK)
]
SGD = replace(QUIET, optimizer="sgd", lr=0.1, max_steps=8)
# The suspects of three ranks; all of them if each has its own gradients.
SUSPECTS = {
    "init-not-broadcast": (2,),
    "forward-through-module": (0, 1, 2),
    "late-head": (0, 1, 2),
    "clip-on-one-rank": (2,),
    "frozen-not-broadcast": (2,),
}


def train_files(ctx: RankContext, settings: Settings) -> list[Path]:
    """Train, and return the file of each rank."""
    run(ctx, settings)
    return [settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(ctx.world_size)]


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"differs-by-node"}))
def test_faults_beside_micro_batches(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """With three uneven micro-batches the run ends, and more differs than unsynchronized statistics."""
    settings = replace(QUIET, max_steps=4, accumulate=3, batch_size=33, fault=fault, out=syncheck_rank.shared)
    if not issubclass(FAULTS[fault], BatchNormFault):
        settings = replace(settings, model="convnet")
    settings = replace(settings, **NEEDS.get(fault, {}))
    files = train_files(ctx, settings)
    quiet = {name for name in tensors(files[0]) if settings.sync_bn or not name.endswith(STATISTICS)}
    # These change the statistics alone, or tensors beside the model.
    outside = ("buffers-never-synced", "adapter-on-one-rank", "average-not-updated")
    assert bool(unlike(*files) & quiet) == (fault not in outside)
    assert unlike(*files)


@pytest.mark.syncheck(ranks=3, timeout=60)
@pytest.mark.parametrize("fault", ODD)
def test_the_last_of_three_ranks_differs(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """The last of three ranks differs and the other two agree; with the optimizer on one rank, rank 0 differs."""
    settings = replace(QUIET, **NEEDS.get(fault, {}), fault=fault, max_steps=4, out=syncheck_rank.shared)
    files = train_files(ctx, settings)
    odd = files.pop(0 if fault == "optimizer-on-one-rank" else 2)
    drift = () if settings.sync_bn else STATISTICS
    assert all(name.endswith(drift) for name in unlike(*files))
    for other in files:
        assert any(not name.endswith(drift) for name in unlike(odd, other))


@pytest.mark.syncheck(ranks=3, timeout=60)
@pytest.mark.parametrize("fault", SUSPECTS)
def test_the_finding_is_the_only_one(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """With SGD's weight decay, momentum and BatchNorm, one finding covers all differences and names its suspects.

    If one rank is odd, the statistics of the other two ranks are a second finding.
    """
    settings = replace(SGD, fault=fault, sync_bn=False, out=syncheck_rank.shared)
    run(ctx, settings)
    (group,) = syncheck.compare(settings.out).groups
    found = [(finding.code, finding.ranks) for finding in group.findings]
    rest = [("SYN201", (0, 1))] if len(SUSPECTS[fault]) == 1 else []
    assert found == [(FAULTS[fault].code, SUSPECTS[fault]), *rest]


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", ["init-not-broadcast", "forward-through-module", "late-head"])
def test_the_difference_over_the_steps(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """The difference of an unequal start is constant, and the difference of unequal gradients grows."""
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


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", ["skipped-step", "optimizer-on-one-rank", "scaler-diverged"])
def test_faults_refuse_a_step_that_overflows(ctx: RankContext, fault: str) -> None:
    """With fp16 a step that every rank skips hides these faults, so all ranks raise an error."""
    settings = replace(QUIET, model="resnet18", amp="fp16", fault=fault, fault_step=2, max_steps=4, save_per_rank=False)
    with pytest.raises(UserError, match=r"all ranks skip step 2.* use a later --fault-step|no state before step 2"):
        run(ctx, settings)
    assert ctx.gather(ctx.rank) == [0, 1]
