"""What --method dp promises: replicas that end as DDP's ranks do, bit for bit, and files of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from scenarios import SMALL, differing, load, run, widest_gap

import syncheck
from train.data import DistributedBatchSampler, load_data
from train.errors import UserError
from train.job import build_optimizer
from train.launch import RankContext
from train.methods import METHODS, check_modifiers
from train.methods.dp import Dp
from train.models import build_model
from train.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from syncheck.testing import Rank
    from train.methods.single import Method

STEPS = 24
DP = replace(SMALL, method="dp")
GPUS = tuple(torch.device("cuda", index) for index in range(3))
STATISTICS = (".running_mean", ".running_var")


def batches(size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    """The first batches of the digits."""
    train = load_data("digits", None, None).train
    for step in range(STEPS):
        x, y = zip(*(train[i] for i in range(step * size, (step + 1) * size)), strict=True)
        yield torch.stack(x), torch.stack(y)


def trained(settings: Settings, ctx: RankContext) -> tuple[Method, Optimizer]:
    """Train on contiguous shares of each batch, as DataParallel deals them out; the trainer's sampler interleaves."""
    torch.manual_seed(settings.seed)
    method = METHODS[settings.method](settings, ctx)
    forward = method.wrap(build_model(settings.model, 1, 10, settings.width))
    optimizer = build_optimizer(settings, method)
    for x, y in batches():
        shares = zip(x.chunk(ctx.world_size), y.chunk(ctx.world_size), strict=True)
        x_share, y_share = list(shares)[ctx.rank]
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.amp == "bf16"):
            loss = F.cross_entropy(forward(x_share), y_share, reduction="sum") / len(x)
        method.backward(loss)
        method.step(optimizer, torch.amp.GradScaler("cpu", enabled=False))
    return method, optimizer


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two state dicts hold the same names, in one order, and the same bits."""
    return list(a) == list(b) and all(a[n].numpy().tobytes() == b[n].numpy().tobytes() for n in a)


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw", "lr": 0.005}, {"amp": "bf16"}], ids=str)
def test_replicas_end_as_the_ranks_of_ddp(ctx: RankContext, changes: dict[str, Any]) -> None:
    """Replica r holds bitwise what rank r of DDP holds after 24 steps: parameters, own statistics, optimizer."""
    ddp, ddp_optimizer = trained(replace(SMALL, **changes), ctx)
    dp, dp_optimizer = trained(replace(DP, **changes), RankContext())
    replicas = [replica.model for replica in dp.state(dp_optimizer)]
    assert same(replicas[ctx.rank], ddp.state(ddp_optimizer)[0].model)
    assert not same(*replicas)
    states = zip(dp_optimizer.state_dict()["state"].values(), ddp_optimizer.state_dict()["state"].values(), strict=True)
    assert all(same(*pair) for pair in states)


class Dealt(DistributedBatchSampler):
    """The samples of each batch in the order in which two ranks would take them, one rank after the other."""

    def __iter__(self) -> Iterator[list[int]]:
        """Put every second sample last."""
        return (batch[0::2] + batch[1::2] for batch in super().__iter__())


@pytest.mark.syncheck(ranks=2)
def test_files_of_both_are_the_same(ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole run of dp on what two ranks see writes their tensors bitwise, evaluations between included."""
    out = syncheck_rank.shared
    settings = replace(SMALL, limit_train=64, max_steps=20, save_every=3, out=out)
    run(ctx, settings)
    monkeypatch.setattr("train.job.DistributedBatchSampler", Dealt)
    alone = replace(settings, method="dp", out=out / f"alone{ctx.rank}")
    saved = run(RankContext(), alone).saved
    assert len(saved) == 14
    names = [(f"dp_rank{rank}.pth", f"ddp_rank{rank}.pth") for rank in range(2)]
    names += [(f"history/dp/step_9/rank_{rank}.pth", f"history/ddp/step_9/rank_{rank}.pth") for rank in range(2)]
    assert [differing(alone.out / dp, out / ddp) for dp, ddp in names] == [set()] * 4


def check_files(settings: Settings, ctx: RankContext, replicas: int) -> None:
    """Train, and see that syncheck finds one step of drift and nothing else, and that files name their replica."""
    saved = run(ctx, settings).saved
    assert [path.name for path in saved] == [f"{settings.run}_rank{rank}.pth" for rank in range(replicas)]
    (group,) = syncheck.compare(settings.out).groups
    assert [finding.code for finding in group.findings] == ["SYN201"]
    assert {diff.name for diff in group.tensors} == {n for n in load(saved[0])["model"] if n.endswith(STATISTICS)}
    blocks = [load(path)["syncheck"] for path in saved]
    assert [(block["rank"], block["world_size"]) for block in blocks] == [(rank, replicas) for rank in range(replicas)]


def test_files_are_judged_as_those_of_ddp(tmp_path: Path) -> None:
    """Of four replicas' files syncheck says what it says of DDP's: running statistics are apart by one step's drift."""
    check_files(replace(DP, replicas=4, out=tmp_path), RankContext(), 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_on_gpus(tmp_path: Path, amp: str) -> None:
    """The same holds of torch's own replicas on two GPUs, in mixed precision too."""
    ctx = RankContext(device=GPUS[0], devices=GPUS[:2])
    check_files(replace(DP, amp=amp, out=tmp_path), ctx, 2)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"batch_size": 3, "replicas": 4}, {"batch_size": 33}])
def test_trains_like_single_without_batchnorm(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Without BatchNorm the weights end where one process ends: micro-batches, uneven and missing shares too."""
    base = replace(DP, model="convnet", width=None, max_steps=20, out=tmp_path, **changes)
    run(RankContext(), base)
    single = replace(base, method="single", replicas=None)
    run(RankContext(), single)
    # As in test_methods.py: a batch's gradient is added up in parts.
    assert widest_gap(tmp_path / f"{base.run}_rank1.pth", tmp_path / f"{single.run}_rank0.pth") < 5e-6


@pytest.mark.parametrize(
    ("ctx", "asked", "replicas", "devices"),
    [
        (RankContext(), None, 2, (torch.device("cpu"),)),
        (RankContext(), 5, 5, (torch.device("cpu"),)),
        (RankContext(device=GPUS[0], devices=GPUS[:1]), None, 2, GPUS[:1]),
        (RankContext(device=GPUS[0], devices=GPUS), None, 3, GPUS),
        (RankContext(device=GPUS[0], devices=GPUS), 2, 2, GPUS[:2]),
    ],
)
def test_replicas_by_default_are_the_gpus(
    ctx: RankContext, asked: int | None, replicas: int, devices: tuple[torch.device, ...]
) -> None:
    """One replica for each GPU or for as many as asked for, two where there are not two GPUs."""
    dp = Dp(Settings(method="dp", replicas=asked), ctx)
    assert (dp.replicas, dp.devices) == (replicas, devices)
    assert dp.buffers.count == replicas


def test_what_cannot_be_is_refused() -> None:
    """More replicas than GPUs, a share of one sample for BatchNorm, and options without a meaning, with the reason."""
    with pytest.raises(UserError, match="--replicas 4: must be at most 3"):
        Dp(Settings(replicas=4), RankContext(device=GPUS[0], devices=GPUS))
    for option, changes in (
        ("--sync-bn", {"sync_bn": True}),
        ("--no-buffer-sync", {"buffer_sync": False}),
        ("--find-unused", {"find_unused": True}),
    ):
        with pytest.raises(UserError, match=f"{option}: not with --method dp: "):
            check_modifiers(replace(DP, **changes))
    uneven = Settings(method="dp", replicas=4, batch_size=26, accumulate=2, max_steps=1)
    with pytest.raises(UserError, match=r"gives BatchNorm a single sample; use a multiple of 8, 16 or more$"):
        run(RankContext(), uneven)
    run(RankContext(), replace(uneven, model="convnet"))
    run(RankContext(), replace(uneven, batch_size=24))
