"""torchvision's ResNets; if images do not have 3 channels, the first convolution is replaced.

They are designed for 224x224 and divide the image size by 32, so 8x8 digits shrink to one pixel in the third stage.
"""

from __future__ import annotations

from torch import nn

from train.errors import UserError


def build_torchvision_resnet(name: str, channels: int, classes: int) -> nn.Module:
    """Build a model of torchvision with random weights. Raises UserError if torchvision is missing."""
    try:
        # Imported only for torchvision models, because the import takes seconds.
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
