"""What a network is built for, and what the table of networks knows of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclass(frozen=True)
class Shape:
    """The data, and what can be chosen of a network; None for its own default.

    channels, image_size: of the images, which are square. width: channels of the first layer. depth, alpha: see the
    networks that have them.
    """

    channels: int
    classes: int
    image_size: int = 32
    width: int | None = None
    depth: int | None = None
    alpha: int | None = None


@dataclass(frozen=True)
class Network:
    """One of the networks. build: may raise UserError. options: those of width, depth and alpha that it has."""

    build: Callable[[Shape], nn.Module]
    paper: str
    options: tuple[str, ...] = ("width",)
