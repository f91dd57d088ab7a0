"""SyncBatchNorm against nn.BatchNorm on the concatenated batch."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from train import sync_batchnorm
from train.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

if TYPE_CHECKING:
    from ranks import Ranks

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


def gaps(
    ctx: RankContext,
    tail: tuple[int, ...],
    split: tuple[int, ...],
    arguments: dict[str, Any],
    fault: str | None = None,
) -> tuple[dict[str, float], list[bytes]]:
    """Run three steps and the evaluation, and measure how far this rank is from BatchNorm on the whole batch.

    fault: breaks the layer on purpose. Returns the largest absolute gaps, and the bytes of the running
    statistics.
    """
    layer = SyncBatchNorm(CHANNELS, **arguments).double()
    whole = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(tail)]
    reference = whole(CHANNELS, **arguments).double()
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

    original = sync_batchnorm.dist.all_reduce
    if fault == "backward stays local":
        sync_batchnorm.dist.all_reduce = lambda tensor, group=None: None
    try:
        for step in range(3):
            torch.manual_seed(10 + step)
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
                total = ctx.sum_over_ranks(parameter.grad.clone()) if fault is None else parameter.grad
                note(f"{name} gradient", total, reference.get_parameter(name).grad)
            for name, buffer in layer.named_buffers():
                note(name, buffer.double(), reference.get_buffer(name).double())
    finally:
        sync_batchnorm.dist.all_reduce = original
    layer.eval()
    reference.eval()
    if layer.running_mean is not None and split[ctx.rank]:
        note("evaluation", layer(x[mine]), reference(x[mine]))
    return worst, [buffer.numpy().tobytes() for buffer in layer.buffers()]


@pytest.mark.parametrize("case", TWO_RANKS)
def test_matches_batchnorm_on_the_whole_batch(two_ranks: Ranks, case: str) -> None:
    """Two ranks with shares of a batch compute what one BatchNorm computes on all of it, forward and backward."""
    answers = two_ranks(gaps, *TWO_RANKS[case])
    for worst, _ in answers:
        assert max(worst.values()) < FLOAT64, worst
    full = max((worst for worst, _ in answers), key=len)
    assert {"output", "input gradient"} <= set(full)
    assert answers[0][1] == answers[1][1], "running statistics must be bitwise equal"


@pytest.mark.parametrize("split", [(3, 5, 1), (4, 0, 3)], ids=str)
def test_merges_three_ranks(three_ranks: Ranks, split: tuple[int, ...]) -> None:
    """Three unequal shares, one of them empty, merge into the statistics of the whole batch."""
    answers = three_ranks(gaps, (4, 3), split, {})
    for worst, statistics in answers:
        assert max(worst.values()) < FLOAT64, worst
        assert statistics == answers[0][1]


def test_the_check_sees_a_backward_that_stays_local(two_ranks: Ranks) -> None:
    """A layer that normalizes globally but differentiates locally is told from a right one."""
    (worst, _), _ = two_ranks(gaps, (4, 3), (3, 5), {}, "backward stays local")
    assert worst["input gradient"] > 1e-3
    assert worst["output"] < FLOAT64


def local_statistics(ctx: RankContext) -> float:
    """Compare plain BatchNorm on a rank's own share with the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(8, CHANNELS, 2, 2)
    mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    gap = nn.BatchNorm2d(CHANNELS)(x[mine]) - SyncBatchNorm(CHANNELS)(x)[mine]
    return gap.abs().max().item()


def test_the_check_sees_statistics_that_stay_local(two_ranks: Ranks) -> None:
    """Plain BatchNorm on each share is far from BatchNorm on the whole batch."""
    assert min(two_ranks(local_statistics)) > 1e-3


def numerical_gradient(ctx: RankContext) -> float:
    """Differentiate the sum over both ranks' losses by finite differences, and compare with backward."""
    torch.manual_seed(3)
    batch, scale = torch.randn(2, 3, 2, dtype=torch.float64), torch.randn(2, 3, 2, dtype=torch.float64)
    layer = SyncBatchNorm(2).double()
    mine = batch[ctx.rank].clone().requires_grad_()
    (layer(mine).sin() * scale[ctx.rank]).sum().backward()
    worst, step = 0.0, 1e-6
    for owner in range(2):
        for index in range(mine.numel()):
            sums = []
            for sign in (1, -1):
                moved = batch.clone()
                moved[owner].view(-1)[index] += sign * step
                loss = (layer(moved[ctx.rank]).sin() * scale[ctx.rank]).sum().detach()
                sums.append(ctx.sum_over_ranks(loss).item())
            if owner == ctx.rank:
                slope = (sums[0] - sums[1]) / (2 * step)
                worst = max(worst, abs(slope - mine.grad.view(-1)[index].item()))
    return worst


def test_gradient_matches_finite_differences(two_ranks: Ranks) -> None:
    """Backward is the slope of the loss of all ranks in the inputs of each of them."""
    # Central differences with a step of 1e-6 err by 1e-12 / 6 of the third derivative and 1e-16 / 1e-6 of
    # rounding.
    assert max(two_ranks(numerical_gradient)) < 1e-7


def too_few(ctx: RankContext, split: tuple[int, int]) -> str:
    """Try a batch that no variance can be taken of."""
    try:
        SyncBatchNorm(CHANNELS)(torch.zeros(split[ctx.rank], CHANNELS))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("split", [(1, 0), (0, 0)], ids=str)
def test_refuses_fewer_than_two_values(two_ranks: Ranks, split: tuple[int, int]) -> None:
    """One value per channel over all ranks raises on every rank, rather than divide by zero on some."""
    assert two_ranks(too_few, split) == [f"expected 2 or more values per channel over all ranks, got {sum(split)}"] * 2


def mixed_precision(ctx: RankContext, dtype: torch.dtype) -> tuple[list[str], float]:
    """Run one step on half-precision input, one rank empty, under autocast."""
    torch.manual_seed(0)
    x = torch.randn(6, CHANNELS, 4, 4).to(dtype)
    mine = (x if ctx.rank == 0 else x[:0]).clone().requires_grad_()
    layer, reference = SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    with torch.autocast("cpu", dtype):
        y = layer(mine)
    y.float().square().sum().backward()
    reference(x.float())
    dtypes = [str(t.dtype) for t in (y, mine.grad, layer.running_mean, layer.running_var, layer.weight.grad)]
    return dtypes, (layer.running_var - reference.running_var).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_float32_statistics(two_ranks: Ranks, dtype: torch.dtype) -> None:
    """Half-precision input gives half-precision output and float32 statistics, on an empty rank too."""
    for dtypes, gap in two_ranks(mixed_precision, dtype):
        assert dtypes == [str(dtype), str(dtype), "torch.float32", "torch.float32", "torch.float32"]
        assert gap < 1e-6  # float32 rounding of a variance near 1


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
