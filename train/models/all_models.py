"""The table of models, and functions that build and list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from train.errors import UserError, refuse
from train.models import pyramidnet, resnet
from train.models.convnet import ConvNet, MnistConvNet
from train.models.gpt import Gpt
from train.models.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from train.settings import Settings

MAX_WIDTH = 65_536  # larger widths overflow in torch


@dataclass(frozen=True)
class Shape:
    """Shape of the data, and options of the model; None selects the model's default.

    channels, image_size: of the square images; channels is 0 for text. width: channels of the first layer. depth:
    layers of a PyramidNet, blocks of a transformer. alpha: channels that a PyramidNet adds over all its blocks.
    """

    channels: int
    classes: int
    image_size: int = 32
    width: int | None = None
    depth: int | None = None
    alpha: int | None = None


@dataclass(frozen=True)
class Network:
    """A row of the table.

    build: returns the model, and may raise UserError. paper: source, for --list-models. options: the supported options
    among width, depth and alpha. text: predicts the next byte of a text, instead of the class of an image.
    """

    build: Callable[[Shape], nn.Module]
    paper: str
    options: tuple[str, ...] = ("width",)
    text: bool = False


def _resnet(block: type[resnet.Block], *blocks: int, source: str = ", 3x3 stem") -> Network:
    return Network(lambda s: resnet.ResNet(block, blocks, s.channels, s.classes, s.width), RESNET + source)


def _torchvision(name: str) -> Network:
    return Network(lambda s: _build_torchvision(name, s.channels, s.classes), f"{RESNET}, torchvision", ())


def _build_torchvision(name: str, channels: int, classes: int) -> nn.Module:
    """Build a ResNet of torchvision with random weights. Raises UserError if torchvision is missing.

    These networks are designed for 224x224 and divide the image size by 32, so 8x8 digits shrink to one pixel in the
    third stage. If images do not have 3 channels, the first convolution is replaced.
    """
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


def _gpt(paper: str, *, tied: bool, experts: bool) -> Network:
    return Network(
        lambda s: Gpt(s.classes, s.width, s.depth, tied=tied, experts=experts), paper, ("width", "depth"), text=True
    )


def _pyramidnet(block: type[pyramidnet.Block | pyramidnet.Bottleneck]) -> Network:
    return Network(
        lambda s: pyramidnet.PyramidNet(block, s.channels, s.classes, s.width, s.depth, s.alpha),
        "https://arxiv.org/abs/1610.02915",
        ("width", "depth", "alpha"),
    )


RESNET = "https://arxiv.org/abs/1512.03385"
MODELS = {
    "resnet8": _resnet(resnet.CifarBlock, 1, 1, 1, source=" 4.2"),
    "resnet20": _resnet(resnet.CifarBlock, 3, 3, 3, source=" 4.2"),
    "resnet18": _resnet(resnet.Block, 2, 2, 2, 2),
    "resnet34": _resnet(resnet.Block, 3, 4, 6, 3),
    "resnet50": _resnet(resnet.Bottleneck, 3, 4, 6, 3),
    "tv_resnet18": _torchvision("resnet18"),
    "tv_resnet34": _torchvision("resnet34"),
    "tv_resnet50": _torchvision("resnet50"),
    "pyramidnet": _pyramidnet(pyramidnet.Block),
    "pyramidnet_bottleneck": _pyramidnet(pyramidnet.Bottleneck),
    "convnet": Network(lambda s: ConvNet(s.channels, s.classes, s.width), "three convolutions"),
    "mnist_convnet": Network(
        lambda s: MnistConvNet(s.channels, s.classes, s.image_size, s.width),
        "github.com/pytorch/examples mnist, with dropout",
    ),
    "transformer": Network(
        lambda s: Transformer(s.channels, s.classes, s.image_size, s.width, s.depth),
        "https://arxiv.org/abs/2010.11929, small",
        ("width", "depth"),
    ),
    "gpt-tiny": _gpt("https://arxiv.org/abs/2302.13971, byte-level", tied=True, experts=False),
    "gpt-tiny-moe": _gpt("https://arxiv.org/abs/2401.04088, byte-level", tied=False, experts=True),
}


def build_model(name: str, channels: int, classes: int, width: int | None, **options: Any) -> nn.Module:
    """Build the model `name` on the CPU from torch's current seed.

    options: image_size, depth and alpha, see Shape. Raises UserError for unknown names, and for options and data that
    the model does not support.
    """
    if name not in MODELS:
        raise UserError(f"--model {name}: unknown; supported: {', '.join(MODELS)}")
    network, shape = MODELS[name], Shape(channels, classes, width=width, **options)
    for option in ("width", "depth", "alpha"):
        number = getattr(shape, option)
        if number is not None and option not in network.options:
            supporting = [model_name for model_name, candidate in MODELS.items() if option in candidate.options]
            raise UserError(f"--{option} {number}: not supported by {name}; use it with {', '.join(supporting)}")
    is_text = channels == 0
    if network.text != is_text:
        text_models = [model_name for model_name, candidate in MODELS.items() if candidate.text]
        problem = "predicts text, not images; use --data text"
        if is_text:
            problem = f"for images, not for text; use {', '.join(text_models)}"
        raise UserError(f"--model {name}: {problem}")
    refuse(((width or 0) > MAX_WIDTH, f"--width {width}: must be at most {MAX_WIDTH}"))
    try:
        return network.build(shape)
    except RuntimeError as error:  # torch has no exception class for a lack of CPU memory
        if "allocate memory" not in str(error):
            raise
        raise UserError(f"--model {name}: not enough memory on this machine") from error


def build_from_settings(settings: Settings, channels: int, classes: int, image_size: int) -> nn.Module:
    """Build the model selected by the settings, or by the metadata of a run, for images of this size.

    Raises UserError.
    """
    s = settings
    return build_model(s.model, channels, classes, s.width, image_size=image_size, depth=s.depth, alpha=s.alpha)
