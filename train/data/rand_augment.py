"""RandAugment (https://arxiv.org/abs/1909.13719) with timm's policy rand-m9-mstd0.5-inc1.

Equal to timm (https://github.com/huggingface/pytorch-image-models/blob/066e490605/timm/data/auto_augment.py):

- the fifteen operations and their ranges; severity always increases with the magnitude (inc1);
- two operations per image, drawn with replacement, each applied with probability 0.5;
- magnitudes from a normal distribution with mean 9 of 10 and standard deviation 0.5, clipped at 10;
- bicubic interpolation, and the mean color for pixels outside the image.

Random numbers come from torch's default generator, so individual images differ from timm's. torchvision's RandAugment
has other operations, always applies them, and uses a fixed magnitude.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageEnhance, ImageOps

if TYPE_CHECKING:
    from collections.abc import Callable

    Fill = tuple[int, ...]
    # Arguments: the image, the magnitude from 0 to 1, and the color of pixels outside the image.
    Operation = Callable[[Image.Image, float, Fill], Image.Image]

COUNT, PROBABILITY = 2, 0.5
MAGNITUDE, DEVIATION, MAX_MAGNITUDE = 9.0, 0.5, 10.0
BICUBIC = Image.Resampling.BICUBIC


def rand_augment(image: Image.Image, fill: Fill) -> Image.Image:
    """Randomly augment an image of mode L or RGB; L skips the operation Color."""
    names = list(OPERATIONS if image.mode == "RGB" else GRAY_OPERATIONS)
    for index in torch.randint(len(names), (COUNT,)).tolist():
        if draw_uniform() < PROBABILITY:
            magnitude = MAGNITUDE + DEVIATION * torch.randn(()).item()
            image = OPERATIONS[names[index]](image, min(max(magnitude, 0), MAX_MAGNITUDE) / MAX_MAGNITUDE, fill)
    return image


def draw_uniform() -> float:
    """Draw a number from [0, 1)."""
    return torch.rand(()).item()


def negate_randomly(number: float) -> float:
    """Negate the number with probability 0.5."""
    return -number if draw_uniform() < 0.5 else number


def transform_affine(image: Image.Image, matrix: tuple[float, ...], fill: Fill) -> Image.Image:
    """Read the pixel at (x, y) from (a x + b y + c, d x + e y + f), with a to f in `matrix`."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, BICUBIC, fillcolor=convert_fill(fill))


def convert_fill(fill: Fill) -> int | Fill:
    """Convert a color to PIL's format: a number for a grayscale image."""
    return fill[0] if len(fill) == 1 else fill


def rotate(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Rotate by up to 30 degrees."""
    return image.rotate(negate_randomly(30 * m), BICUBIC, fillcolor=convert_fill(fill))


def shear_x(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Shear horizontally by a factor of up to 0.3."""
    return transform_affine(image, (1, negate_randomly(0.3 * m), 0, 0, 1, 0), fill)


def shear_y(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Shear vertically by a factor of up to 0.3."""
    return transform_affine(image, (1, 0, 0, negate_randomly(0.3 * m), 1, 0), fill)


def translate_x(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Shift horizontally by up to 0.45 times the width."""
    return transform_affine(image, (1, 0, negate_randomly(0.45 * m) * image.width, 0, 1, 0), fill)


def translate_y(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Shift vertically by up to 0.45 times the height."""
    return transform_affine(image, (1, 0, 0, 0, 1, negate_randomly(0.45 * m) * image.height), fill)


def posterize(image: Image.Image, m: float, fill: Fill) -> Image.Image:  # noqa: ARG001 - one signature for all
    """Keep the 4 to 1 highest bits of each value; timm's minimum is 0 bits, which PIL no longer accepts."""
    return ImageOps.posterize(image, max(1, 4 - math.floor(4 * m)))


def solarize(image: Image.Image, m: float, fill: Fill) -> Image.Image:  # noqa: ARG001
    """Invert all values from a threshold of 256 to 0."""
    return ImageOps.solarize(image, 256 - math.floor(256 * m))


def solarize_add(image: Image.Image, m: float, fill: Fill) -> Image.Image:  # noqa: ARG001
    """Add up to 110 to all values below 128."""
    table = [min(255, value + math.floor(110 * m)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """Return an operation that applies PIL's enhancement with a factor of 0.1 to 1.9; 1 is the identity."""
    return lambda image, m, _: kind(image).enhance(max(0.1, 1 + negate_randomly(0.9 * m)))


OPERATIONS: dict[str, Operation] = {
    "AutoContrast": lambda image, *_: ImageOps.autocontrast(image),
    "Equalize": lambda image, *_: ImageOps.equalize(image),
    "Invert": lambda image, *_: ImageOps.invert(image),
    "Rotate": rotate,
    "Posterize": posterize,
    "Solarize": solarize,
    "SolarizeAdd": solarize_add,
    "Color": enhance(ImageEnhance.Color),
    "Contrast": enhance(ImageEnhance.Contrast),
    "Brightness": enhance(ImageEnhance.Brightness),
    "Sharpness": enhance(ImageEnhance.Sharpness),
    "ShearX": shear_x,
    "ShearY": shear_y,
    "TranslateX": translate_x,
    "TranslateY": translate_y,
}
GRAY_OPERATIONS = tuple(name for name in OPERATIONS if name != "Color")
