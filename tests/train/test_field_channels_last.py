"""--channels-last: equal training in another memory format, and files that compare as equal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from support.listings import find_all, list_rank_files
from support.scenarios import SMALL, load, run, trained, widest_gap
from support.states import list_differing
from torch import Tensor, nn

import syncheck
from syncheck.testing import assert_in_sync
from train.launch import RankContext
from train.models.convnet import ConvNet

if TYPE_CHECKING:
    from pathlib import Path

    from syncheck.testing import Rank

CONVNET = replace(SMALL, method="single", model="convnet", max_steps=20)
# The tolerance of test_methods.py: sums in another order, over 20 steps.
ROUNDING = 5e-6


def to_channels_last(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert 4-dimensional tensors to channels_last, which keeps their logical values."""
    nhwc = torch.channels_last
    return {name: t.contiguous(memory_format=nhwc) if t.dim() == 4 else t for name, t in state.items()}


def is_nhwc(tensor: Tensor) -> bool:
    """Return whether a tensor is in channels_last format and not also contiguous."""
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_channels_last_changes_only_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, momentum and activations are in channels_last; the result is within rounding of the usual format."""
    activations: list[bool] = []
    forward = ConvNet.forward

    def record_format(self: ConvNet, x: Tensor) -> Tensor:
        if self.training:
            activations.append(is_nhwc(self.conv1(x)))
        return forward(self, x)

    monkeypatch.setattr(ConvNet, "forward", record_format)
    usual = run(RankContext(), replace(CONVNET, out=tmp_path)).saved[0]
    assert not any(activations)
    activations.clear()
    settings = replace(CONVNET, channels_last=True, out=tmp_path)
    job = trained(RankContext(), settings)
    assert activations
    assert all(activations)
    weight = job.method.module.get_parameter("conv2.weight")
    assert is_nhwc(weight)
    assert is_nhwc(job.trainer.optimizer.state[weight]["momentum_buffer"])
    assert widest_gap(usual, tmp_path / "single-channels-last_rank0.pth") < ROUNDING


def test_files_compare_equal_in_both_formats(tmp_path: Path) -> None:
    """Files of equal values compare as identical in both formats, and a single changed element is located."""
    settings = replace(CONVNET, channels_last=True, max_steps=2, out=tmp_path)
    (saved,) = run(RankContext(), settings).saved
    state = load(saved)["model"]
    (flat,) = run(RankContext(), replace(settings, save_format="safetensors")).saved  # replaces the .pth file
    values = load_file(flat)  # always contiguous in safetensors
    assert not list_differing(state, values)
    assert is_nhwc(state["conv2.weight"])
    pair = list_rank_files(tmp_path, "pair_rank{}.pth", 2)
    torch.save({"model": to_channels_last(state)}, pair[0])
    torch.save({"model": {name: t.contiguous() for name, t in state.items()}}, pair[1])
    counts = syncheck.compare(*pair).groups[0].counts
    assert (counts.identical, counts.different) == (len(state), 0)
    state["conv2.weight"][1, 2, 0, 1] += 1
    torch.save({"model": state}, pair[0])
    (group,) = syncheck.compare(*pair).groups
    (diff,) = find_all(group.tensors, status="different")
    assert diff.name == "conv2.weight"
    assert diff.index == (1, 2, 0, 1)


@pytest.mark.syncheck(ranks=2)
def test_ranks_may_have_different_formats(syncheck_rank: Rank) -> None:
    """A rank with channels_last weights is in sync with a contiguous rank, and a different element is reported."""
    torch.manual_seed(0)
    model: nn.Module = ConvNet(1, 10, 4)
    if syncheck_rank.rank == 1:
        model = model.to(memory_format=torch.channels_last)
        assert is_nhwc(model.get_parameter("conv2.weight"))
    assert_in_sync(model)
    with torch.no_grad():
        model.get_parameter("conv2.weight")[1, 2, 0, 1] += syncheck_rank.rank
    with pytest.raises(syncheck.OutOfSync, match=r"conv2.weight"):
        assert_in_sync(model)


@pytest.mark.slow
@pytest.mark.syncheck(ranks=2)
@pytest.mark.parametrize("hook", ["none", "powersgd"])
def test_ranks_stay_equal(ctx: RankContext, syncheck_rank: Rank, hook: str) -> None:
    """Under ddp, channels_last ranks stay in sync and close to a run in the usual format, with PowerSGD too."""
    settings = replace(CONVNET, method="ddp", sync_bn=True, out=syncheck_rank.shared)
    usual = run(ctx, replace(settings, comm_hook=hook)).saved[0]
    saved = run(ctx, replace(settings, comm_hook=hook, channels_last=True)).saved
    assert syncheck.compare(*saved).verdict == "in_sync"
    # A bucket holds its gradients in memory order, so PowerSGD's random Q applies to other elements.
    assert widest_gap(usual, saved[0]) < (ROUNDING if hook == "none" else 0.1)


def test_other_layers_do_not_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model without convolutions trains bitwise equally with and without --channels-last."""

    def linear(*_: Any, **__: Any) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    monkeypatch.setattr("train.task.build_from_settings", linear)
    files = [run(RankContext(), replace(CONVNET, channels_last=on, out=tmp_path)).saved[0] for on in (False, True)]
    assert widest_gap(*files) == 0
