"""The networks, by the name that --model takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import UserError
from train.models.cifar_resnet import resnet8, resnet20
from train.models.convnet import convnet
from train.models.resnet18 import resnet18
from train.models.torchvision_resnet import tv_resnet18, tv_resnet50

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# Each takes the channels of the images, the number of classes, and its width or None for its own default.
MODELS: dict[str, Callable[[int, int, int | None], nn.Module]] = {
    "resnet8": resnet8,
    "resnet20": resnet20,
    "resnet18": resnet18,
    "convnet": convnet,
    "tv_resnet18": tv_resnet18,
    "tv_resnet50": tv_resnet50,
}


def build_model(name: str, channels: int, classes: int, width: int | None) -> nn.Module:
    """Build the network `name` on the CPU from torch's current seed. Raises UserError for an unknown name."""
    if name not in MODELS:
        raise UserError(f"--model {name}: unknown; there are {', '.join(MODELS)}")
    return MODELS[name](channels, classes, width)
