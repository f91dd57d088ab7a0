"""Faults in complete runs: the differing rank, its finding, micro-batches and overflows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import NEEDED_OPTIONS, QUIET, differing_tensors
from support.listings import list_codes, list_fields, list_rank_files
from support.scenarios import run, tensors

import syncheck
from syncheck.diagnose.statements import Course
from train.errors import UserError
from train.faults import FAULTS
from train.faults.buffers import BatchNormFault

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank
    from train.launch import RankContext
    from train.settings import Settings

STATISTICS = ("running_mean", "running_var")
DDP_FAULTS = {name for name, fault in FAULTS.items() if "ddp" in fault.methods and fault.in_files}
# Faults that affect every rank, and differs-by-node, which needs four ranks.
EVERY_RANK = {
    *("buffers-never-synced", "forward-through-module", "grad-not-reduced-once", "late-head"),
    *("differs-by-node", "local-normalizer"),
}
SINGLE_RANK_FAULTS = sorted(DDP_FAULTS - EVERY_RANK)
SGD = replace(QUIET, optimizer="sgd", lr=0.1, max_steps=8)
# The suspects in a run of three ranks; every rank if each rank has its own gradients.
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
    return list_rank_files(settings.out, f"{settings.run}_rank{{}}.pth", ctx.world_size)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", sorted(DDP_FAULTS - {"differs-by-node"}))
def test_faults_with_micro_batches(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """With three uneven micro-batches the run completes, and each fault changes tensors of its kind."""
    settings = replace(QUIET, max_steps=4, accumulate=3, batch_size=33, fault=fault, out=syncheck_rank.shared)
    if not issubclass(FAULTS[fault], BatchNormFault):
        settings = replace(settings, model="convnet")
    settings = replace(settings, **NEEDED_OPTIONS.get(fault, {}))
    files = train_files(ctx, settings)
    synchronized = {name for name in tensors(files[0]) if settings.sync_bn or not name.endswith(STATISTICS)}
    # These faults change only statistics, or tensors outside the model.
    outside = ("buffers-never-synced", "adapter-on-one-rank", "average-not-updated")
    assert bool(differing_tensors(*files) & synchronized) == (fault not in outside)
    assert differing_tensors(*files)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=3, timeout=60)
@pytest.mark.parametrize("fault", SINGLE_RANK_FAULTS)
def test_the_last_of_three_ranks_differs(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """The last of three ranks differs and the first two agree; with optimizer-on-one-rank, rank 0 differs."""
    settings = replace(QUIET, **NEEDED_OPTIONS.get(fault, {}), fault=fault, max_steps=4, out=syncheck_rank.shared)
    files = train_files(ctx, settings)
    outlier = files.pop(0 if fault == "optimizer-on-one-rank" else 2)
    drift = () if settings.sync_bn else STATISTICS
    assert all(name.endswith(drift) for name in differing_tensors(*files))
    for second in files:
        assert any(not name.endswith(drift) for name in differing_tensors(outlier, second))


@pytest.mark.slow
@pytest.mark.syncheck(ranks=3, timeout=60)
@pytest.mark.parametrize("fault", SUSPECTS)
def test_one_finding_covers_all_differences(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """With SGD's weight decay, momentum and BatchNorm, one finding covers all differences and names its suspects.

    If a single rank is suspect, the statistics of the other two ranks are a second finding. A late head does not
    explain the statistics of the wrapped layers.
    """
    settings = replace(SGD, fault=fault, sync_bn=False, out=syncheck_rank.shared)
    run(ctx, settings)
    (group,) = syncheck.compare(settings.out).groups
    findings = list_fields(group.findings, "code", "ranks")
    statistics = [("SYN201", (0, 1))] if len(SUSPECTS[fault]) == 1 else []
    if fault == "late-head":
        statistics = [("SYN201", (0, 1, 2))]
    assert findings == [(FAULTS[fault].code, SUSPECTS[fault]), *statistics]


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", ["init-not-broadcast", "forward-through-module", "late-head"])
def test_difference_over_the_steps(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """The difference between unequal initial weights is constant; the difference from unequal gradients grows."""
    settings = replace(SGD, fault=fault, save_every=2, out=syncheck_rank.shared)
    run(ctx, settings)
    report = syncheck.compare(settings.out / "history")
    codes = set(list_codes(report.findings))
    assert codes == {FAULTS[fault].code}
    (finding,) = report.groups[-1].findings
    assert finding.history is not None
    assert finding.history.since == 2
    facts = dict(list_fields(finding.facts, "code", "parameters"))
    assert facts[Course.UNCHANGED if fault == "init-not-broadcast" else Course.GREW]["step"] == 2


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", ["skipped-step", "optimizer-on-one-rank", "scaler-diverged"])
def test_faults_reject_an_overflowing_step(ctx: RankContext, fault: str) -> None:
    """If every rank skips the fault's step because of fp16, the fault has no effect, and all ranks raise an error."""
    settings = replace(QUIET, model="resnet18", amp="fp16", fault=fault, fault_step=2, max_steps=4, save_per_rank=False)
    with pytest.raises(UserError, match=r"all ranks skip step 2.* use a later --fault-step|no state before step 2"):
        run(ctx, settings)
    assert ctx.gather(ctx.rank) == [0, 1]
