"""Which rank goes wrong, and that a fault never strikes at a step that all ranks leave out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import NEEDS, QUIET, unlike
from scenarios import run

from train.errors import UserError
from train.faults import FAULTS

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

# On all ranks alike, or on every rank its own; differs-by-node needs four ranks.
EVERY_RANK = {"buffers-never-synced", "forward-through-module", "late-head", "differs-by-node", "local-normalizer"}
# One of each kind by default: at the start, in memory, in the reduction, in the files. The others are many.
BY_DEFAULT = {"frozen-not-broadcast", "bit-flip-weight", "clip-on-one-rank", "stale-rank"}
ODD = [
    pytest.param(fault, marks=() if fault in BY_DEFAULT else pytest.mark.slow)
    for fault in sorted(set(FAULTS) - EVERY_RANK)
]


@pytest.mark.syncheck(ranks=3, timeout=60)
@pytest.mark.parametrize("fault", ODD)
def test_the_last_of_three_ranks_is_the_odd_one(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """Of three ranks the last is apart and the others agree; with the optimizer on one rank, rank 0 is apart."""
    settings = replace(QUIET, **NEEDS.get(fault, {}), fault=fault, max_steps=4, out=syncheck_rank.shared)
    run(ctx, settings)
    files = [settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(3)]
    odd = files.pop(0 if fault == "optimizer-on-one-rank" else 2)
    drift = set() if settings.sync_bn else {"running_mean", "running_var"}
    assert {name for name in unlike(*files) if name.rpartition(".")[2] not in drift} == set()
    for other in files:
        assert {name for name in unlike(odd, other) if name.rpartition(".")[2] not in drift}


@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", ["skipped-step", "optimizer-on-one-rank", "scaler-diverged"])
def test_a_step_that_overflows_is_no_step_to_strike_at(ctx: RankContext, fault: str) -> None:
    """With fp16 a step that every rank leaves out hides these faults, so all ranks refuse it, and say what to do."""
    settings = replace(QUIET, model="resnet18", amp="fp16", fault=fault, fault_step=2, max_steps=4, save_per_rank=False)
    with pytest.raises(UserError, match=r"all ranks skip step 2.* use a later --fault-step|no state before step 2"):
        run(ctx, settings)
    assert ctx.gather(ctx.rank) == [0, 1]
