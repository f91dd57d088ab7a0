"""SyncBatchNorm against nn.BatchNorm on the concatenated batch."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from syncheck.testing import assert_in_sync
from train.methods import sync_batchnorm
from train.methods.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

if TYPE_CHECKING:
    from train.launch import RankContext

CHANNELS = 5
# Dimensions after the channels, samples per rank, and arguments of the layer.
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
# Tolerance: float64 rounds by 2.2e-16 per operation. Sums over up to 96 values and a division by a standard deviation
# near 1 accumulate some tens of roundings; the limit is ten times larger. A wrong formula causes errors above 1e-2.
FLOAT64 = 1e-13


def max_differences(
    ctx: RankContext, layer: SyncBatchNorm, tail: tuple[int, ...], split: tuple[int, ...]
) -> dict[str, float]:
    """Run three steps and an evaluation; return this rank's largest differences from BatchNorm on the whole batch."""
    complete = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(tail)]
    options = {name: getattr(layer, name) for name in ("momentum", "affine", "track_running_stats")}
    reference = complete(CHANNELS, **options).double()
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
        torch.manual_seed(10 + step)  # all ranks draw the same batch
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
            # Parameter gradients cover only this rank's samples; their sum covers the whole batch.
            total = ctx.sum_over_ranks(parameter.grad.clone())
            note(f"{name} gradient", total, reference.get_parameter(name).grad)
        for name, buffer in layer.named_buffers():
            note(name, buffer.double(), reference.get_buffer(name).double())
    layer.eval()
    reference.eval()
    if layer.running_mean is not None:
        note("evaluation", layer(x[mine]), reference(x[mine]))
    return worst


def assert_matches_batchnorm(ctx: RankContext, tail: tuple[int, ...], split: tuple[int, ...], **arguments: Any) -> None:
    """Assert that a layer matches BatchNorm on the whole batch and is in sync over the ranks."""
    layer = SyncBatchNorm(CHANNELS, **arguments).double()
    worst = max_differences(ctx, layer, tail, split)
    assert max(worst.values()) < FLOAT64, worst
    assert split[ctx.rank] == 0 or {"output", "input gradient"} <= set(worst)
    assert_in_sync(layer)  # bitwise, including running statistics


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("case", TWO_RANKS)
def test_matches_batchnorm_on_the_whole_batch(ctx: RankContext, case: str) -> None:
    """Two ranks with shares of a batch match one BatchNorm on the whole batch, forward and backward."""
    tail, split, arguments = TWO_RANKS[case]
    assert_matches_batchnorm(ctx, tail, split, **arguments)


@pytest.mark.syncheck(ranks=3)
@pytest.mark.parametrize("split", [(3, 5, 1), (4, 0, 3)], ids=str)
def test_merges_three_ranks(ctx: RankContext, split: tuple[int, ...]) -> None:
    """Three unequal shares, also with an empty share, match BatchNorm on the whole batch."""
    assert_matches_batchnorm(ctx, (4, 3), split)


@pytest.mark.syncheck(ranks=2)
def test_detects_a_local_backward(ctx: RankContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with global statistics but a local backward exceeds the tolerance of the input gradient."""
    monkeypatch.setattr(sync_batchnorm.dist, "all_reduce", lambda tensor, group=None: None)
    worst = max_differences(ctx, SyncBatchNorm(CHANNELS).double(), (4, 3), (3, 5))
    assert worst["input gradient"] > 1e-3
    assert worst["output"] < FLOAT64


@pytest.mark.syncheck(ranks=2)
def test_detects_local_statistics(ctx: RankContext) -> None:
    """Plain BatchNorm on a share differs by more than 1e-3 from BatchNorm on the whole batch."""
    torch.manual_seed(0)
    x = torch.randn(8, CHANNELS, 2, 2)
    mine = slice(4 * ctx.rank, 4 * ctx.rank + 4)
    difference = nn.BatchNorm2d(CHANNELS)(x[mine]) - SyncBatchNorm(CHANNELS)(x)[mine]
    assert difference.abs().max() > 1e-3


@pytest.mark.syncheck(ranks=2)
def test_gradient_matches_finite_differences(ctx: RankContext) -> None:
    """The input gradient on each rank equals the finite difference of the loss summed over all ranks."""
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
    # Error of central differences with a step of 1e-6: 1e-12 / 6 of the third derivative, and 1e-16 / 1e-6 of rounding.
    assert (slopes[ctx.rank] - mine.grad).abs().max() < 1e-7


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("split", [(1, 0), (0, 0)], ids=str)
def test_refuses_fewer_than_two_values(ctx: RankContext, split: tuple[int, int]) -> None:
    """Fewer than two values per channel over all ranks raise an error on every rank."""
    message = rf"^expected 2 or more values per channel over all ranks, got {sum(split)}$"
    with pytest.raises(ValueError, match=message):
        SyncBatchNorm(CHANNELS)(torch.zeros(split[ctx.rank], CHANNELS))


@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_float32_statistics(ctx: RankContext, dtype: torch.dtype) -> None:
    """Half-precision inputs give half-precision outputs and float32 statistics, also on a rank without samples."""
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


def test_equals_batchnorm_without_a_group() -> None:
    """Without a process group, outputs and statistics are bitwise equal to nn.BatchNorm2d."""
    torch.manual_seed(0)
    x = torch.randn(4, CHANNELS, 3, 3)
    layer, reference = SyncBatchNorm(CHANNELS), nn.BatchNorm2d(CHANNELS)
    assert torch.equal(layer(x), reference(x))
    assert torch.equal(layer.running_var, reference.running_var)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.zeros(3))


def test_conversion_keeps_the_tensors() -> None:
    """Converted layers keep their parameter and buffer objects and their mode; shared layers stay shared."""
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
