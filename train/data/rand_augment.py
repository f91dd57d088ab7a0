"""RandAugment (https://arxiv.org/abs/1909.13719) with the policy that timm writes rand-m9-mstd0.5-inc1.

The same as timm's (https://github.com/huggingface/pytorch-image-models/blob/066e490605/timm/data/auto_augment.py): the
fifteen operations and their ranges, two of them for each image drawn with replacement, each applied with probability
one half at a magnitude from a normal distribution around 9 of 10 with deviation 0.5 cut off at 10, severity that
increases with the magnitude for all (inc1), bicubic interpolation, the mean colour where an image ends. Not the same:
the random numbers come from torch's default generator, so no image is that which timm would make. torchvision's
RandAugment has another set of operations, always applies them, and has one fixed magnitude.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from PIL import Image, ImageEnhance, ImageOps

if TYPE_CHECKING:
    from collections.abc import Callable

    Fill = tuple[int, ...]
    # Takes the image, the magnitude from 0 to 1, and the colour of what lies outside the image.
    Operation = Callable[[Image.Image, float, Fill], Image.Image]

COUNT, PROBABILITY = 2, 0.5
MAGNITUDE, DEVIATION, MOST = 9.0, 0.5, 10.0
BICUBIC = Image.Resampling.BICUBIC


def rand_augment(image: Image.Image, fill: Fill) -> Image.Image:
    """Change an image of mode L or RGB at random; for L, whose colour cannot change, there is one operation less."""
    names = list(OPERATIONS if image.mode == "RGB" else GREY)
    for index in torch.randint(len(names), (COUNT,)).tolist():
        if uniform() < PROBABILITY:
            magnitude = MAGNITUDE + DEVIATION * torch.randn(()).item()
            image = OPERATIONS[names[index]](image, min(max(magnitude, 0), MOST) / MOST, fill)
    return image


def uniform() -> float:
    """Draw a number from 0 to below 1."""
    return torch.rand(()).item()


def signed(number: float) -> float:
    """Negate it in half of all cases."""
    return -number if uniform() < 0.5 else number


def affine(image: Image.Image, matrix: tuple[float, ...], fill: Fill) -> Image.Image:
    """Take the pixel at (x, y) from (a x + b y + c, d x + e y + f), with a to f in `matrix`."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, BICUBIC, fillcolor=colour(fill))


def colour(fill: Fill) -> int | Fill:
    """Write a colour as PIL wants it: a number for a grey image."""
    return fill[0] if len(fill) == 1 else fill


def rotate(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Turn it by up to 30 degrees."""
    return image.rotate(signed(30 * m), BICUBIC, fillcolor=colour(fill))


def shear_x(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Move each row by up to 0.3 times its number."""
    return affine(image, (1, signed(0.3 * m), 0, 0, 1, 0), fill)


def shear_y(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Move each column by up to 0.3 times its number."""
    return affine(image, (1, 0, 0, signed(0.3 * m), 1, 0), fill)


def translate_x(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Move it sideways by up to 0.45 of its width."""
    return affine(image, (1, 0, signed(0.45 * m) * image.width, 0, 1, 0), fill)


def translate_y(image: Image.Image, m: float, fill: Fill) -> Image.Image:
    """Move it up or down by up to 0.45 of its height."""
    return affine(image, (1, 0, 0, 0, 1, signed(0.45 * m) * image.height), fill)


def posterize(image: Image.Image, m: float, fill: Fill) -> Image.Image:  # noqa: ARG001 - one signature for all
    """Keep the 4 to 1 highest bits of each value; timm goes down to 0, which PIL no longer takes."""
    return ImageOps.posterize(image, max(1, 4 - math.floor(4 * m)))


def solarize(image: Image.Image, m: float, fill: Fill) -> Image.Image:  # noqa: ARG001
    """Invert all values from a threshold on, of 256 to 0."""
    return ImageOps.solarize(image, 256 - math.floor(256 * m))


def solarize_add(image: Image.Image, m: float, fill: Fill) -> Image.Image:  # noqa: ARG001
    """Add up to 110 to all values below 128."""
    table = [min(255, value + math.floor(110 * m)) if value < 128 else value for value in range(256)]
    return image.point(table * len(image.getbands()))


def enhance(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Operation:
    """Apply one of PIL's enhancements by a factor of 0.1 to 1.9, where 1 changes nothing."""
    return lambda image, m, _: kind(image).enhance(max(0.1, 1 + signed(0.9 * m)))


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
GREY = tuple(name for name in OPERATIONS if name != "Color")
