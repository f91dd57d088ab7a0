"""The collectives of a context, and errors raised on all ranks together."""

from __future__ import annotations

import pytest
import torch

from train.errors import UserError
from train.launch import RankContext


def test_context_of_one_process() -> None:
    """A context without a launcher is rank 0 of 1 on the CPU, without a process group."""
    ctx = RankContext()
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node) == (0, 1, 0, 1, 0)
    assert (ctx.is_main, ctx.device.type, ctx.devices, ctx.backend) == (True, "cpu", (), None)


def fail_together(ctx: RankContext, text: str | None) -> str:
    """Raise the text, if any, inside `share_errors`; return the error message, or "went on" without an error."""
    try:
        with ctx.share_errors():
            if text is not None:
                raise UserError(text)
    except UserError as error:
        return str(error)
    return "went on"


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([None, None], "went on"),
        ([None, "no file"], "rank 1: no file"),
        (["no file", "no file"], "no file"),
        (["no a", "no b"], "rank 0: no a"),
    ],
    ids=str,
)
def test_ranks_fail_together(ctx: RankContext, texts: list[str | None], expected: str) -> None:
    """An error of any rank is raised on every rank, with the failing rank unless all ranks raise the same error."""
    assert fail_together(ctx, texts[ctx.rank]) == expected


def test_one_process_fails_alone() -> None:
    """Without peers the error is raised unchanged, without a rank prefix."""
    assert fail_together(RankContext(), None) == "went on"
    assert fail_together(RankContext(), "no file") == "no file"


@pytest.mark.syncheck(ranks=[2, 3])
def test_collectives_of_several_ranks(ctx: RankContext) -> None:
    """Sums cover all ranks, and gathered lists are in rank order."""
    ranks = list(range(ctx.world_size))
    assert ctx.sum_over_ranks(torch.tensor([1, ctx.rank])).tolist() == [ctx.world_size, sum(ranks)]
    assert ctx.gather(ctx.rank) == ranks


def test_collectives_of_one_process() -> None:
    """Without a process group, collectives return the process's own values."""
    assert RankContext().sum_over_ranks(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert RankContext().gather("own") == ["own"]
