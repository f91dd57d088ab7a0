"""The arguments of a model's build function."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Shape of the data, and options of the model; None selects the model's default.

    channels, image_size: of the square images. width: channels of the first layer. depth: layers of a PyramidNet,
    blocks of the transformer. alpha: channels that a PyramidNet adds over all its blocks.
    """

    channels: int
    classes: int
    image_size: int = 32
    width: int | None = None
    depth: int | None = None
    alpha: int | None = None
