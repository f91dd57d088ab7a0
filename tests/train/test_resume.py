"""A run that was interrupted and resumed ends with the bits of one that was not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from resumed import TINY, assert_bitwise
from scenarios import fsdp

if TYPE_CHECKING:
    from syncheck.testing import Rank
    from train.launch import RankContext

# Each option with the methods on which it leaves a state of its own.
CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "ddp, in an epoch": ({}, [3]),
    "ddp, first step": ({"optimizer": "adamw", "lr": 0.005}, [1]),
    "ddp, end of an epoch": ({"ema": 0.9, "sync_bn": True}, [4]),
    "ddp, before the last step, fp16, uneven": ({"amp": "fp16", "batch_size": 15, "keep_last": True}, [9]),
    "zero, twice": ({"method": "zero", "optimizer": "adamw", "lr": 0.005, "accumulate": 2}, [3, 6]),
    "localsgd, before the averages": ({"method": "localsgd", "average_every": 2}, [2]),
    "localsgd, between averages": ({"method": "localsgd", "average_every": 2, "amp": "bf16"}, [5]),
    "fsdp": ({"method": "fsdp", "optimizer": "adamw", "lr": 0.005, "amp": "fp16"}, [3]),
    "fsdp, sgd": ({"method": "fsdp", "sync_bn": True, "batch_size": 15, "keep_last": True}, [5]),
}


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("case", [fsdp(name) if "fsdp" in name else name for name in CASES])
def test_resumed_is_bitwise_equal(ctx: RankContext, syncheck_rank: Rank, case: str) -> None:
    """Weights, buffers, optimizer, scale, averages, counts, random states, files and scores are the same bits."""
    changes, stops = CASES[case]
    assert_bitwise(ctx, syncheck_rank.shared, replace(TINY, **changes), stops)
