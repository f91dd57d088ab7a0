"""The networks: their sizes against the papers', and what they accept."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.errors import UserError
from train.models import MODELS, build_model
from train.models.cifar_resnet import CifarResNet


def parameters(model: nn.Module) -> int:
    """Count them."""
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("name", MODELS)
def test_takes_small_images(name: str, size: int) -> None:
    """Every model takes a batch of 8x8 digits and of 32x32 colour images, and learns from it."""
    if name.startswith("tv_"):
        pytest.importorskip("torchvision")
    channels = 1 if size == 8 else 3
    model = build_model(name, channels, 10, None)
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 10)
    logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_sizes_are_the_papers() -> None:
    """resnet20 has the 0.27 million parameters of the paper's table 6, resnet18 the known 11.17 million."""
    assert round(parameters(build_model("resnet20", 3, 10, None)) / 1e6, 2) == 0.27
    assert parameters(build_model("resnet18", 3, 10, None)) == 11_173_962
    convolutions = [m for m in build_model("resnet8", 1, 10, None).modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 7
    with pytest.raises(ValueError, match="6n"):
        CifarResNet(10, 3, 10, 16)


def test_resnet18_is_named_like_torchvisions() -> None:
    """Its 122 tensors have the names, order and, but for the stem, the shapes of torchvision's resnet18."""
    pytest.importorskip("torchvision")
    ours = build_model("resnet18", 3, 10, None).state_dict()
    theirs = build_model("tv_resnet18", 3, 10, None).state_dict()
    assert list(ours) == list(theirs)
    assert len(ours) == 122
    assert [name for name in ours if ours[name].shape != theirs[name].shape] == ["conv1.weight"]


def test_width_is_a_knob() -> None:
    """A narrower model is smaller; torchvision's cannot be made so; the convnet has no BatchNorm."""
    for name in ("resnet8", "resnet18", "convnet"):
        assert parameters(build_model(name, 1, 10, 4)) < parameters(build_model(name, 1, 10, 8))
    with pytest.raises(UserError, match="--width 4: tv_resnet50 has a fixed width"):
        build_model("tv_resnet50", 3, 10, 4)
    assert not any(isinstance(m, _BatchNorm) for m in build_model("convnet", 1, 10, None).modules())


def test_unknown_name_lists_the_known() -> None:
    """A name that is not in the table is answered with those that are."""
    with pytest.raises(UserError, match="--model vgg: unknown; there are resnet8, "):
        build_model("vgg", 1, 10, None)
