"""torchvision's ResNets, untouched but for the first convolution where images have other than 3 channels.

Made for 224x224: they shrink the image 32 times, so 8x8 digits are one pixel from the third stage on.
"""

from __future__ import annotations

from torch import nn

from train.errors import UserError


def tv_resnet18(channels: int, classes: int, width: int | None) -> nn.Module:
    """Build torchvision's resnet18 with random weights."""
    return _build("resnet18", channels, classes, width)


def tv_resnet50(channels: int, classes: int, width: int | None) -> nn.Module:
    """Build torchvision's resnet50 with random weights."""
    return _build("resnet50", channels, classes, width)


def _build(name: str, channels: int, classes: int, width: int | None) -> nn.Module:
    if width is not None:
        raise UserError(f"--width {width}: tv_{name} has a fixed width; --model resnet18 has the knob")
    try:
        # Here, because it takes seconds and few runs need it.
        from torchvision import models  # type: ignore[import-untyped]
    except ImportError as error:
        raise UserError(f"--model tv_{name} needs torchvision: pip install -e '.[train]'") from error
    model: nn.Module = getattr(models, name)(weights=None, num_classes=classes)
    if channels != 3:
        stem = model.get_submodule("conv1")
        assert isinstance(stem, nn.Conv2d)
        new = nn.Conv2d(channels, stem.out_channels, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
        model.register_module("conv1", new)
    return model
