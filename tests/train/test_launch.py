"""Who a process is, from its environment, and how ranks fail together."""

from __future__ import annotations

import pytest
import torch

from train.errors import RankError, UserError
from train.launch import RankContext, from_environment, pick_device

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_reads_torchrun() -> None:
    """torchrun's variables become a context; without GPUs it is gloo on the CPU."""
    ctx = from_environment(TORCHRUN, "ddp", grouped=True)
    assert (ctx.rank, ctx.world_size, ctx.local_rank, ctx.is_main) == (3, 4, 1, False)
    assert ctx.backend == ("nccl" if ctx.device.type == "cuda" else "gloo")


def test_single_needs_no_launcher() -> None:
    """One process without a launcher, or under a launcher of one, has no process group."""
    of_one = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for environment in ({}, of_one):
        ctx = from_environment(environment, "single", grouped=False)
        assert (ctx.world_size, ctx.backend) == (1, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": None}, "RANK is not set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "x"}, "RANK is 'x', not a number"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2', not a number"),
        ({"RANK": "4"}, "RANK=4 with WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ],
    ids=str,
)
def test_broken_environment_is_named(change: dict[str, str | None], message: str) -> None:
    """A variable that is missing or makes no sense is named, by the rank that has it."""
    environment = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(RankError, match=message):
        from_environment(environment, "ddp", grouped=True)


def test_launcher_must_fit_the_method() -> None:
    """ddp without torchrun says how to start it; single under two processes is refused."""
    with pytest.raises(UserError, match="--method ddp needs a launcher: start it with 'torchrun --nproc-per-node 2"):
        from_environment({}, "ddp", grouped=True)
    with pytest.raises(UserError, match="--method single is one process, the launcher started 4"):
        from_environment(TORCHRUN, "single", grouped=False)


@pytest.mark.parametrize(("gpus", "processes", "device"), [(2, 2, "cuda:1"), (1, 2, "cpu"), (0, 2, "cpu")])
def test_gpus_are_not_shared(monkeypatch: pytest.MonkeyPatch, gpus: int, processes: int, device: str) -> None:
    """Each process gets a GPU of its own, and where there are too few for that, all compute on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_device(1, processes) == torch.device(device)


def fail_together(ctx: RankContext, text: str | None) -> str:
    """Run a block that fails where there is a text; return how it ended."""
    try:
        with ctx.together():
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
    """What fails on one rank raises on all of them alike, and says which rank it was where that matters."""
    assert fail_together(ctx, texts[ctx.rank]) == expected


def test_one_process_fails_alone() -> None:
    """Without peers the error is what was raised, without a rank before it."""
    assert fail_together(RankContext(), None) == "went on"
    assert fail_together(RankContext(), "no file") == "no file"


@pytest.mark.syncheck(ranks=[2, 3])
def test_collectives_of_many(ctx: RankContext) -> None:
    """Sums and lists are over all ranks, in their order."""
    ranks = list(range(ctx.world_size))
    assert ctx.sum_over_ranks(torch.tensor([1, ctx.rank])).tolist() == [ctx.world_size, sum(ranks)]
    assert ctx.gather(ctx.rank) == ranks


def test_collectives_of_one() -> None:
    """Without a process group sums and lists are the process's own."""
    assert RankContext().sum_over_ranks(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert RankContext().gather("own") == ["own"]
