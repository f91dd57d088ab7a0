"""torchvision's ResNets, untouched but for the first convolution where images have other than 3 channels.

Made for 224x224: they shrink the image 32 times, so 8x8 digits are one pixel from the third stage on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from train.errors import UserError

if TYPE_CHECKING:
    from train.models.shape import Shape


def tv_resnet18(shape: Shape) -> nn.Module:
    """Build torchvision's resnet18 with random weights."""
    return _build("resnet18", shape)


def tv_resnet34(shape: Shape) -> nn.Module:
    """Build torchvision's resnet34 with random weights."""
    return _build("resnet34", shape)


def tv_resnet50(shape: Shape) -> nn.Module:
    """Build torchvision's resnet50 with random weights."""
    return _build("resnet50", shape)


def _build(name: str, shape: Shape) -> nn.Module:
    try:
        # Here, because it takes seconds and few runs need it.
        from torchvision import models  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"--model tv_{name} needs torchvision: pip install -e '.[train]'") from error
    model: nn.Module = getattr(models, name)(weights=None, num_classes=shape.classes)
    if shape.channels != 3:
        stem = model.get_submodule("conv1")
        assert isinstance(stem, nn.Conv2d)
        new = nn.Conv2d(shape.channels, stem.out_channels, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
        model.register_module("conv1", new)
    return model
