"""The networks, by the name that --model takes."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from train.errors import UserError
from train.listing import format_table
from train.models.cifar_resnet import resnet8, resnet20
from train.models.convnet import convnet
from train.models.mnist_convnet import mnist_convnet
from train.models.pyramidnet import pyramidnet, pyramidnet_bottleneck
from train.models.resnet import resnet18, resnet34, resnet50
from train.models.shape import Network, Shape
from train.models.torchvision_resnet import tv_resnet18, tv_resnet34, tv_resnet50
from train.models.transformer import transformer

__all__ = ["MODELS", "Choice", "build_chosen", "build_model", "list_models"]

MOST_WIDTH = 65_536  # what is above is a slip of the finger, and overflows in torch
RESNET, PYRAMIDNET = "https://arxiv.org/abs/1512.03385", "https://arxiv.org/abs/1610.02915"
MODELS = {
    "resnet8": Network(resnet8, f"{RESNET} 4.2"),
    "resnet20": Network(resnet20, f"{RESNET} 4.2"),
    "resnet18": Network(resnet18, f"{RESNET}, 3x3 stem"),
    "resnet34": Network(resnet34, f"{RESNET}, 3x3 stem"),
    "resnet50": Network(resnet50, f"{RESNET}, 3x3 stem"),
    "tv_resnet18": Network(tv_resnet18, f"{RESNET}, torchvision", ()),
    "tv_resnet34": Network(tv_resnet34, f"{RESNET}, torchvision", ()),
    "tv_resnet50": Network(tv_resnet50, f"{RESNET}, torchvision", ()),
    "pyramidnet": Network(pyramidnet, PYRAMIDNET, ("width", "depth", "alpha")),
    "pyramidnet_bottleneck": Network(pyramidnet_bottleneck, PYRAMIDNET, ("width", "depth", "alpha")),
    "convnet": Network(convnet, "three convolutions"),
    "mnist_convnet": Network(mnist_convnet, "github.com/pytorch/examples mnist, with dropout"),
    "transformer": Network(transformer, "https://arxiv.org/abs/2010.11929, small", ("width", "depth")),
}


def build_model(
    name: str,
    channels: int,
    classes: int,
    width: int | None,
    *,
    image_size: int = 32,
    depth: int | None = None,
    alpha: int | None = None,
) -> nn.Module:
    """Build the network `name` on the CPU from torch's current seed.

    Raises UserError for an unknown name, and for options and images that the network cannot take.
    """
    if name not in MODELS:
        raise UserError(f"--model {name}: unknown; there are {', '.join(MODELS)}")
    network = MODELS[name]
    for option, number in (("width", width), ("depth", depth), ("alpha", alpha)):
        if number is not None and option not in network.options:
            others = ", ".join(other for other in MODELS if option in MODELS[other].options)
            raise UserError(f"--{option} {number}: {name} has a fixed {option}; those with the option are {others}")
    if width is not None and width > MOST_WIDTH:
        raise UserError(f"--width {width}: needs {MOST_WIDTH} or less")
    try:
        return network.build(Shape(channels, classes, image_size, width, depth, alpha))
    except RuntimeError as error:  # torch has no class of its own for the CPU's memory
        if "allocate memory" not in str(error):
            raise
        raise UserError(f"--model {name}: not enough memory on this machine") from error


class Choice(Protocol):
    """A network and its options, as settings and a run's metadata name them; None for the network's own."""

    @property
    def model(self) -> str:
        """Its name."""

    @property
    def width(self) -> int | None:
        """The channels of its first block."""

    @property
    def depth(self) -> int | None:
        """Its layers."""

    @property
    def alpha(self) -> int | None:
        """By how many channels a PyramidNet widens."""


def build_chosen(choice: Choice, channels: int, classes: int, image_size: int) -> nn.Module:
    """Build the network that is chosen, for these images, as `build_model` does. Raises UserError."""
    return build_model(
        choice.model,
        channels,
        classes,
        choice.width,
        image_size=image_size,
        depth=choice.depth,
        alpha=choice.alpha,
    )


def list_models() -> str:
    """Write a line for each network: name, parameters, layers that normalize, and source; folded on a terminal.

    Parameters are those for images of 3x32x32 and 10 classes.
    """
    rows = [("name", "parameters", "norm", "source")]
    for name, network in MODELS.items():
        try:
            with torch.device("meta"):  # no memory, and no time for random numbers
                model = build_model(name, 3, 10, None)
        except UserError as error:  # of torchvision, if it is missing
            rows.append((name, "", "", str(error)))
            continue
        parameters = sum(parameter.numel() for parameter in model.parameters())
        norms = {
            type(module).__name__.removesuffix("2d")
            for module in model.modules()
            if isinstance(module, (_BatchNorm, nn.LayerNorm))
        }
        rows.append((name, f"{parameters:>10,}", " ".join(norms) or "none", network.paper))
    return format_table(rows)
