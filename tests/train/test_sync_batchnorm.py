"""SyncBatchNorm against nn.BatchNorm on the concatenated batch."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from syncheck.testing import assert_in_sync
from train import sync_batchnorm
from train.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

if TYPE_CHECKING:
    from train.launch import RankContext

CHANNELS = 5
# What follows the channels in the input's shape, samples per rank, and arguments of the layer.
TWO_RANKS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "2d": ((), (3, 5), {}),
    "3d": ((4,), (2, 2), {}),
    "4d": ((4, 3), (4, 4), {}),
    "5d": ((2, 3, 2), (2, 3), {}),
    "one sample against seven": ((4, 3), (1, 7), {}),
    "an empty rank": ((4, 3), (4, 0), {}),
    "rank 0 empty": ((), (0, 6), {}),
    "momentum none": ((4, 3), (3, 5), {"momentum": None}),
    "no affine": ((4, 3), (3, 5), {"affine": False}),
    "no running statistics": ((4, 3), (3, 5), {"track_running_stats": False}),
}
# float64 has 2.2e-16 per operation. Sums over up to 96 values, and a division by a standard deviation near 1,
# leave some tens of that; ten times as much is allowed. A wrong formula is off by 1e-2 or more.
FLOAT64 = 1e-13


def gaps(ctx: RankContext, layer: SyncBatchNorm, tail: tuple[int, ...], split: tuple[int, ...]) -> dict[str, float]:
    """Run three steps and the evaluation; return this rank's largest gaps to BatchNorm on the whole batch."""
    whole = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(tail)]
    options = {name: getattr(layer, name) for name in ("momentum", "affine", "track_running_stats")}
    reference = whole(CHANNELS, **options).double()
    if layer.affine:
        torch.manual_seed(1)
        for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
            ours.data = torch.randn(CHANNELS, dtype=torch.float64)
            theirs.data = ours.data.clone()
    end = list(accumulate(split))[ctx.rank]
    mine = slice(end - split[ctx.rank], end)
    worst: dict[str, float] = {}

    def note(name: str, a: Tensor | None, b: Tensor | None) -> None:
        if a is not None and b is not None and a.numel():
            worst[name] = max(worst.get(name, 0.0), (a.detach() - b.detach()).abs().max().item())

    for step in range(3):
        torch.manual_seed(10 + step)  # all ranks draw the same batch, and take their shares
        x = torch.randn(sum(split), CHANNELS, *tail, dtype=torch.float64) * 3 + 2
        dy = torch.randn_like(x)
        whole_x, my_x = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
        layer.zero_grad()
        reference.zero_grad()
        expected, y = reference(whole_x), layer(my_x)
        (expected * dy).sum().backward()
        (y * dy[mine]).sum().backward()
        note("output", y, expected[mine])
        note("input gradient", my_x.grad, whole_x.grad[mine])
        for name, parameter in layer.named_parameters():
            # Each rank has its own samples' share; together they are the whole batch's.
            total = ctx.sum_over_ranks(parameter.grad.clone())
            note(f"{name} gradient", total, reference.get_parameter(name).grad)
        for name, buffer in layer.named_buffers():
            note(name, buffer.double(), reference.get_buffer(name).double())
    layer.eval()
    reference.eval()
    if layer.running_mean is not None:
        note("evaluation", layer(x[mine]), reference(x[mine]))
    return worst


def check(ctx: RankContext, tail: tuple[int, ...], split: tuple[int, ...], **arguments: Any) -> None:
    """Compare with BatchNorm on the whole batch, and the layer with those of the other ranks."""
    layer = SyncBatchNorm(CHANNELS, **arguments).double()
    worst = gaps(ctx, layer, tail, split)
    assert max(worst.values()) < FLOAT64, worst
    assert split[ctx.rank] == 0 or {"output", "input gradient"} <= set(worst)
    assert_in_sync(layer)  # bit by bit, running statistics too


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("case", TWO_RANKS)
def test_matches_batchnorm_on_the_whole_batch(ctx: RankContext, case: str) -> None:
    """Two ranks with shares of a batch compute what one BatchNorm computes on all of it, forward and backward."""
    tail, split, arguments = TWO_RANKS[case]
    check(ctx, tail, split, **arguments)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("split", [(3, 5, 1), (4, 0, 3)], ids=str)
def test_merges_three_ranks(ctx: RankContext, split: tuple[int, ...]) -> None:
    """Three unequal shares, one of them empty, merge into the statistics of the whole batch."""
    check(ctx, (4, 3), split)


@pytest.mark.syncheck(ranks=2)
def test_the_check_sees_a_backward_that_stays_local(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that normalizes globally but differentiates locally is told from a right one."""
    monkeypatch.setattr(sync_batchnorm.dist, "all_reduce", lambda tensor, group=None: None)
    worst = gaps(ctx, SyncBatchNorm(CHANNELS).double(), (4, 3), (3, 5))
    assert worst["input gradient"] > 1e-3
    assert worst["output"] < FLOAT64


@pytest.mark.syncheck(ranks=2)
def test_the_check_sees_statistics_that_stay_local(ctx: RankContext) -> None:
    """Plain BatchNorm on each share is far from BatchNorm on the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(8, CHANNELS, 2, 2)
    mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    gap = nn.BatchNorm2d(CHANNELS)(x[mine]) - SyncBatchNorm(CHANNELS)(x)[mine]
    assert gap.abs().max() > 1e-3


@pytest.mark.syncheck(ranks=2)
def test_gradient_matches_finite_differences(ctx: RankContext) -> None:
    """Backward is the slope of the loss of all ranks in the inputs of each of them."""
    torch.manual_seed(3)
    batch, scale = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64)
    layer = SyncBatchNorm(2).double()
    mine = batch[ctx.rank].clone().requires_grad_()
    (layer(mine).sin() * scale[ctx.rank]).sum().backward()
    slopes, step = torch.empty_like(batch), 1e-6
    for index in range(batch.numel()):
        sums = []
        for sign in (1, -1):
            moved = batch.clone()
            moved.view(-1)[index] += sign * step
            loss = (layer(moved[ctx.rank]).sin() * scale[ctx.rank]).sum().detach()
            sums.append(ctx.sum_over_ranks(loss))
        slopes.view(-1)[index] = (sums[0] - sums[1]) / (2 * step)
    # Central differences with a step of 1e-6 err by 1e-12 / 6 of the third derivative and 1e-16 / 1e-6 of
    # rounding.
    assert (slopes[ctx.rank] - mine.grad).abs().max() < 1e-7


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("split", [(1, 0), (0, 0)], ids=str)
def test_refuses_fewer_than_two_values(ctx: RankContext, split: tuple[int, int]) -> None:
    """One value per channel over all ranks raises on every rank, rather than divide by zero on some."""
    message = rf"^expected 2 or more values per channel over all ranks, got {sum(split)}$"
    with pytest.raises(ValueError, match=message):
        SyncBatchNorm(CHANNELS)(torch.zeros(split[ctx.rank], CHANNELS))


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_float32_statistics(ctx: RankContext, dtype: torch.dtype) -> None:
    """Half-precision input gives half-precision output and float32 statistics, on an empty rank too."""
    torch.manual_seed(0)
    x = torch.randn(6, CHANNELS, 4, 4).to(dtype)
    mine = (x if ctx.rank == 0 else x[:0]).clone().requires_grad_()
    layer, reference = SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    with torch.autocast("cpu", dtype):
        y = layer(mine)
    y.float().square().sum().backward()
    reference(x.float())
    assert {y.dtype, mine.grad.dtype} == {dtype}
    assert {layer.running_mean.dtype, layer.running_var.dtype, layer.weight.grad.dtype} == {torch.float32}
    assert (layer.running_var - reference.running_var).abs().max() < 1e-6  # float32 rounding of a variance near 1


def test_alone_it_is_batchnorm() -> None:
    """Without a process group it gives the bits of nn.BatchNorm2d."""
    torch.manual_seed(0)
    x = torch.randn(4, CHANNELS, 3, 3)
    layer, reference = SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    assert torch.equal(layer(x), reference(x))
    assert torch.equal(layer.running_var, reference.running_var)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.zeros(3))


def test_conversion_keeps_the_tensors() -> None:
    """Converted layers hold the same Parameter and buffer objects, keep their mode, and shared ones stay shared."""
    shared = nn.BatchNorm2d(4, momentum=None)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), shared, nn.ModuleDict({"a": nn.BatchNorm1d(4, affine=False), "b": shared})
    )
    shared.eval()
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert convert_sync_batchnorm(model) is model
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    layer = model[1]
    assert isinstance(layer, SyncBatchNorm)
    assert layer is model[2]["b"]
    assert layer.momentum is None
    assert not layer.training
    assert model[2]["a"].weight is None
    assert list(model.state_dict()) == list(nn.Sequential(*model).state_dict())
    assert isinstance(convert_sync_batchnorm(nn.BatchNorm2d(4)), SyncBatchNorm)
