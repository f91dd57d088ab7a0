"""Context parallelism: equal to one process, causal across slices, and bitwise equal ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.scenarios import run, trained
from support.sequences import GPT, ROUNDING, difference_to_single

import syncheck
from train.errors import UserError
from train.launch import RankContext
from train.methods.cp import Cp

if TYPE_CHECKING:
    from syncheck.testing import Rank

CP = replace(GPT, method="cp")


@pytest.mark.slow
@pytest.mark.syncheck(ranks=4)
@pytest.mark.parametrize(
    "changes",
    [
        {"context_mode": "ulysses", "accumulate": 3, "grad_clip": 0.5},
        {"parallel_degree": 2, "accumulate": 2, "batch_size": 11},
        pytest.param({"context_mode": "ulysses", "parallel_degree": 2}, marks=pytest.mark.slow),
    ],
    ids=["ulysses, repeated key heads", "allgather, two groups", "ulysses, two groups"],
)
def test_trains_like_single(ctx: RankContext, changes: dict[str, Any]) -> None:
    """The losses of 20 steps equal those of one process within rounding, for slices of 16 and 32 tokens."""
    assert difference_to_single(ctx, replace(CP, **changes)) < ROUNDING


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("mode", ["allgather", "ulysses"])
def test_slices_equal_the_whole_sequence(ctx: RankContext, syncheck_rank: Rank, mode: str) -> None:
    """Ranks are in sync, and their outputs equal those of one process; a changed token changes no earlier output."""
    settings = replace(CP, context_mode=mode, max_steps=2, save_per_rank=True, out=syncheck_rank.shared)
    (group,) = syncheck.compare(*run(ctx, settings).saved).groups
    assert (group.verdict, group.counts.not_compared) == ("in_sync", 0)
    job = trained(ctx, settings)
    assert isinstance(job.method, Cp)
    x = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(1))
    changed = x.clone()
    changed[:, 40] = (x[:, 40] + 1) % 256
    outputs: list[torch.Tensor] = []
    with torch.no_grad():
        for tokens in (x, changed):
            job.method.evaluate(tokens, tokens, lambda logits, _: outputs.append(logits))
    unchanged = 40 - 32 * ctx.rank  # outputs of this rank before the changed token
    assert torch.equal(outputs[0][:, :unchanged], outputs[1][:, :unchanged])
    assert torch.equal(outputs[0], outputs[1]) is (ctx.rank == 0)
    single = trained(RankContext(), replace(settings, method="single", context_mode=None, save_per_rank=False))
    expected = single.method.module(x).chunk(2, 1)[ctx.rank]
    torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-4)


@pytest.mark.syncheck(ranks=3)
def test_refusals(ctx: RankContext) -> None:
    """Sequences and heads that cannot be divided, and models without attention, are refused in one line."""
    for changes, message in (
        ({}, "^--method cp: sequences of 64 tokens cannot be divided by 3 ranks; change --parallel-degree$"),
        ({"context_mode": "ulysses"}, "^--context-mode ulysses: 4 attention heads cannot be divided by 3 ranks; "),
        ({"model": "convnet", "data": "digits", "width": None, "depth": None}, "^--model convnet: .*use gpt-tiny"),
    ):
        with pytest.raises(UserError, match=message):
            trained(ctx, replace(CP, **changes))
