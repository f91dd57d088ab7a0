"""Planted desyncs together with what changes the order of collectives: nothing waits for ever."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from planted import NEEDS, QUIET, unlike
from scenarios import run, tensors

from train.faults import FAULTS
from train.faults.batchnorm import BatchNormFault

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

TWO_RANKS = [name for name in FAULTS if name != "differs-by-node"]
NEVER_EQUAL = ("running_mean", "running_var")


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2, timeout=60)
@pytest.mark.parametrize("fault", TWO_RANKS)
def test_micro_batches(ctx: RankContext, syncheck_rank: Rank, fault: str) -> None:
    """With three micro-batches in uneven shares a run with the fault ends, and what differs is not BatchNorm's lag."""
    settings = replace(QUIET, max_steps=4, accumulate=3, batch_size=33, fault=fault, out=syncheck_rank.shared)
    if not issubclass(FAULTS[fault], BatchNormFault):
        settings = replace(settings, model="convnet")
    settings = replace(settings, **NEEDS.get(fault, {}))
    run(ctx, settings)
    files = [settings.out / f"{settings.run}_rank{rank}.pth" for rank in range(2)]
    quiet = {name for name in tensors(files[0]) if settings.sync_bn or not name.endswith(NEVER_EQUAL)}
    # What is never synchronized differs in no other tensors than what is a step behind; an adapter and an average are
    # beside the model.
    outside = ("buffers-never-synced", "adapter-on-one-rank", "average-not-updated")
    assert bool(unlike(*files) & quiet) == (fault not in outside)
    assert unlike(*files)
