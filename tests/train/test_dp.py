"""--method dp: replicas end bitwise equal to the ranks of DDP, and each replica has its own files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from support.listings import list_codes, list_fields, list_names
from support.scenarios import SMALL, differing, load, run, widest_gap

import syncheck
from train.data import DistributedBatchSampler, load_data
from train.errors import UserError
from train.launch import RankContext
from train.methods import METHODS, check_modifiers
from train.methods.dp import Dp
from train.models import build_model
from train.parts import build_optimizer
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
    """Yield the first batches of the digits."""
    train = load_data("digits", None, None).train
    for step in range(STEPS):
        x, y = zip(*(train[i] for i in range(step * size, (step + 1) * size)), strict=True)
        yield torch.stack(x), torch.stack(y)


def train_on_shares(settings: Settings, ctx: RankContext) -> tuple[Method, Optimizer]:
    """Train on contiguous shares of each batch, like DataParallel; the trainer's sampler interleaves the shares."""
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


def are_bitwise_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return whether two state dicts have the same names in the same order, and bitwise equal tensors."""
    return list(a) == list(b) and all(a[n].numpy().tobytes() == b[n].numpy().tobytes() for n in a)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("changes", [{}, {"optimizer": "adamw", "lr": 0.005}, {"amp": "bf16"}], ids=str)
def test_replicas_equal_the_ranks_of_ddp(ctx: RankContext, changes: dict[str, Any]) -> None:
    """After 24 steps, replica r is bitwise equal to rank r of DDP: parameters, own statistics and optimizer state."""
    ddp, ddp_optimizer = train_on_shares(replace(SMALL, **changes), ctx)
    dp, dp_optimizer = train_on_shares(replace(DP, **changes), RankContext())
    replicas = list_fields(dp.list_replicas(dp_optimizer), "model")
    assert are_bitwise_equal(replicas[ctx.rank], ddp.list_replicas(ddp_optimizer)[0].model)
    assert not are_bitwise_equal(*replicas)
    states = zip(dp_optimizer.state_dict()["state"].values(), ddp_optimizer.state_dict()["state"].values(), strict=True)
    assert all(are_bitwise_equal(*pair) for pair in states)


class SplitByRank(DistributedBatchSampler):
    """Batches in which the samples of rank 0 precede the samples of rank 1."""

    def __iter__(self) -> Iterator[list[int]]:
        """Move every second sample to the end of its batch."""
        return (batch[0::2] + batch[1::2] for batch in super().__iter__())


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
def test_dp_and_ddp_write_equal_files(ctx: RankContext, syncheck_rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the samples of two ranks, dp writes tensors bitwise equal to DDP's, with evaluations between the steps."""
    out = syncheck_rank.shared
    settings = replace(SMALL, limit_train=64, max_steps=20, save_every=3, out=out)
    run(ctx, settings)
    monkeypatch.setattr("train.parts.DistributedBatchSampler", SplitByRank)
    alone = replace(settings, method="dp", out=out / f"alone{ctx.rank}")
    saved = run(RankContext(), alone).saved
    assert len(saved) == 14
    names = [(f"dp_rank{rank}.pth", f"ddp_rank{rank}.pth") for rank in range(2)]
    names += [(f"history/dp/step_9/rank_{rank}.pth", f"history/ddp/step_9/rank_{rank}.pth") for rank in range(2)]
    assert [differing(alone.out / dp, out / ddp) for dp, ddp in names] == [set()] * 4


def check_files(settings: Settings, ctx: RankContext, replicas: int) -> None:
    """Train, then check that syncheck reports only SYN201 and that the metadata of each file contains its replica."""
    saved = run(ctx, settings).saved
    assert list_names(saved) == [f"{settings.run}_rank{rank}.pth" for rank in range(replicas)]
    (group,) = syncheck.compare(settings.out).groups
    assert list_codes(group.findings) == ["SYN201"]
    assert set(list_names(group.tensors)) == {n for n in load(saved[0])["model"] if n.endswith(STATISTICS)}
    blocks = [load(path)["syncheck"] for path in saved]
    assert list_fields(blocks, "rank", "world_size") == [(rank, replicas) for rank in range(replicas)]


def test_files_get_the_finding_of_ddp(tmp_path: Path) -> None:
    """For four replicas, syncheck reports the finding of plain DDP: running statistics drift by one step."""
    check_files(replace(DP, replicas=4, out=tmp_path), RankContext(), 4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_on_gpus(tmp_path: Path, amp: str) -> None:
    """The files of torch's own replicas on two GPUs get the same finding, in mixed precision too."""
    ctx = RankContext(device=GPUS[0], devices=GPUS[:2])
    check_files(replace(DP, amp=amp, out=tmp_path), ctx, 2)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 2}, {"batch_size": 3, "replicas": 4}, {"batch_size": 33}])
def test_trains_like_single_without_batchnorm(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Without BatchNorm, weights end within rounding of one process, also with micro-batches and uneven shares."""
    base = replace(DP, model="convnet", width=None, max_steps=20, out=tmp_path, **changes)
    run(RankContext(), base)
    single = replace(base, method="single", replicas=None)
    run(RankContext(), single)
    # The tolerance of test_methods.py: a batch's gradient is summed in parts.
    assert widest_gap(tmp_path / f"{base.run}_rank1.pth", tmp_path / f"{single.run}_rank0.pth") < 5e-6


@pytest.mark.parametrize(
    ("ctx", "requested", "replicas", "devices"),
    [
        (RankContext(), None, 2, (torch.device("cpu"),)),
        (RankContext(), 5, 5, (torch.device("cpu"),)),
        (RankContext(device=GPUS[0], devices=GPUS[:1]), None, 2, GPUS[:1]),
        (RankContext(device=GPUS[0], devices=GPUS), None, 3, GPUS),
        (RankContext(device=GPUS[0], devices=GPUS), 2, 2, GPUS[:2]),
    ],
)
def test_default_is_one_replica_per_gpu(
    ctx: RankContext, requested: int | None, replicas: int, devices: tuple[torch.device, ...]
) -> None:
    """By default, dp has one replica per GPU, but at least two; --replicas sets another number."""
    dp = Dp(Settings(method="dp", replicas=requested), ctx)
    assert (dp.replicas, dp.devices) == (replicas, devices)
    assert dp.buffers.count == replicas


def test_invalid_settings_are_refused() -> None:
    """More replicas than GPUs, BatchNorm shares of one sample, and inapplicable options are refused with a reason."""
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
