"""The table of models, and functions that build and list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
from train.models.shape import Shape
from train.models.torchvision_resnet import tv_resnet18, tv_resnet34, tv_resnet50
from train.models.transformer import transformer

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_WIDTH = 65_536  # larger widths overflow in torch


@dataclass(frozen=True)
class Network:
    """A row of the table.

    build: returns the model, and may raise UserError. paper: source, for --list-models. options: the supported options
    among width, depth and alpha.
    """

    build: Callable[[Shape], nn.Module]
    paper: str
    options: tuple[str, ...] = ("width",)


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
    """Build the model `name` on the CPU from torch's current seed.

    Raises UserError for unknown names, and for options and image sizes that the model does not support.
    """
    if name not in MODELS:
        raise UserError(f"--model {name}: unknown; supported: {', '.join(MODELS)}")
    network = MODELS[name]
    for option, number in (("width", width), ("depth", depth), ("alpha", alpha)):
        if number is not None and option not in network.options:
            others = ", ".join(other for other in MODELS if option in MODELS[other].options)
            raise UserError(f"--{option} {number}: not supported by {name}; use it with {others}")
    if width is not None and width > MAX_WIDTH:
        raise UserError(f"--width {width}: must be at most {MAX_WIDTH}")
    try:
        return network.build(Shape(channels, classes, image_size, width, depth, alpha))
    except RuntimeError as error:  # torch has no exception class for a lack of CPU memory
        if "allocate memory" not in str(error):
            raise
        raise UserError(f"--model {name}: not enough memory on this machine") from error


class ModelSettings(Protocol):
    """Model name and options, common to Settings and the metadata of a run; None selects the model's default."""

    @property
    def model(self) -> str:
        """Key of MODELS."""

    @property
    def width(self) -> int | None:
        """Channels of the first layer."""

    @property
    def depth(self) -> int | None:
        """Number of layers or blocks."""

    @property
    def alpha(self) -> int | None:
        """Channels that a PyramidNet adds over all its blocks."""


def build_from_settings(settings: ModelSettings, channels: int, classes: int, image_size: int) -> nn.Module:
    """Build the model selected by the settings for images of this size. Raises UserError."""
    return build_model(
        settings.model,
        channels,
        classes,
        settings.width,
        image_size=image_size,
        depth=settings.depth,
        alpha=settings.alpha,
    )


def list_models() -> str:
    """Format the table of models: name, number of parameters, normalization layers, source.

    The number of parameters is for images of 3x32x32 and 10 classes.
    """
    rows = [("name", "parameters", "norm", "source")]
    for name, network in MODELS.items():
        try:
            with torch.device("meta"):  # allocates no memory, and skips the initialization
                model = build_model(name, 3, 10, None)
        except UserError as error:  # torchvision is not installed
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
