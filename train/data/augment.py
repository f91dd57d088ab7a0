"""Random augmentation of training images, a pure function of the run's seed, the epoch and the index of the image.

The result is therefore equal on any rank, with any number of ranks and workers, and after a resume within an epoch.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train.errors import UserError, refuse
from train.seeds import draw_integers, mixed, mixed_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from train.data.dataset import Augment, DataOptions, Normalize

AUGMENTATIONS = ("none", "basic", "strong", "timm")
# Brightness, contrast and saturation are multiplied by 0.6 to 1.4.
JITTER = 0.4
ERASE_PROBABILITY = 0.25
# Streams of random numbers; BasicAugment uses stream 0, and `mixup` stream 2.
STRONG_STREAM, TIMM_STREAM = 1, 3
# Arguments of timm's create_transform: RandAugment as in timm's recipes for ImageNet, and random erasing with noise.
# The crop has timm's defaults: 8 % to 100 % of the area, and sides of 3:4 to 4:3.
# mmax9: at magnitude 10, timm 1.0.31 posterizes to 0 bits, which Pillow 13 refuses.
TIMM_RECIPE: dict[str, Any] = {
    "is_training": True,
    "auto_augment": "rand-m9-mstd0.5-mmax9-inc1",
    "interpolation": "bicubic",
    "re_prob": ERASE_PROBABILITY,
    "re_mode": "pixel",
}


def build_augment(options: DataOptions, channels: int, *, flip: bool) -> Augment | None:
    """Build the augmentation selected by the options, or return None for --augment none.

    flip: whether mirroring preserves the class, which is not true for digits. Raises UserError for unknown names,
    unsupported numbers of channels, and if torchvision or timm is missing.
    """
    if options.augment == "none":
        return None
    option = f"--augment {options.augment}"
    needs_colors = options.augment != "basic"
    refuse(
        (options.augment not in AUGMENTATIONS, f"{option}: unknown; supported: {', '.join(AUGMENTATIONS)}"),
        (
            needs_colors and channels not in (1, 3),
            f"{option}: images have {channels} channels, not 1 or 3; use --augment basic",
        ),
    )
    kinds: dict[str, Callable[..., Augment]] = {"basic": BasicAugment, "strong": StrongAugment, "timm": TimmAugment}
    try:
        return kinds[options.augment](options.seed, flip=flip)
    except ImportError as error:
        name, package = ("timm", "timm") if options.augment == "timm" else ("torchvision", "-e '.[train]'")
        raise UserError(f"{option}: {name} is not installed; run pip install {package}") from error


class BasicAugment:
    """Randomly shift images by up to an eighth of their size, and mirror them.

    This is the augmentation in section 4.2 of https://arxiv.org/abs/1512.03385: pad a 32x32 image with 4 black pixels,
    take a random crop of the original size, and flip it horizontally. Whole batches are processed at once.
    """

    def __init__(self, seed: int, *, flip: bool) -> None:
        self.seed, self.flip = seed, flip

    def __call__(self, pixels: Tensor, indices: Tensor, epoch: int, normalize: Normalize) -> Tensor:
        """Shift, mirror and normalize the images, as described in Augment."""
        return normalize(self.shift_and_flip(pixels, indices, epoch))

    def shift_and_flip(self, pixels: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Shift and mirror the images: uint8 [N, channels, H, W] to the same shape and dtype."""
        count, _, height, width = pixels.shape
        pad = max(1, height // 8)
        keys = mixed_each(mixed(self.seed, epoch), indices.numpy())
        # Remainders of 64 random bits deviate from a uniform distribution by less than 2**-50.
        sizes = (2 * pad + 1, 2 * pad + 1, 2)
        top, columns, mirror = (torch.from_numpy(draw_integers(keys, n, size)) for n, size in enumerate(sizes))
        padded = F.pad(pixels, (pad, pad, pad, pad))
        if self.flip:
            padded = torch.where(mirror.view(-1, 1, 1, 1) == 1, padded.flip(3), padded)
        # A view of all windows, [N, channels, 2 * pad + 1, 2 * pad + 1, H, W]; indexing copies one window per image.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(count), :, top, columns]


class StrongAugment:
    """BasicAugment, then color jitter and RandAugment, and after normalization random erasing.

    RandAugment (https://arxiv.org/abs/1909.13719) is torchvision's: two operations per image at magnitude 9 of 30. The
    erased rectangle covers 2 % to a third of the image and is filled with normal noise per pixel, which is timm's mode
    "pixel" (https://arxiv.org/abs/1708.04896). torchvision does not change the saturation of grayscale images.
    """

    def __init__(self, seed: int, *, flip: bool) -> None:
        # Imported only for --augment strong and timm, because the import takes seconds.
        from torchvision.transforms import v2  # type: ignore[import-untyped]

        self.seed, self.flip = seed, flip
        self.change: Callable[[Tensor], Tensor] = v2.ColorJitter(JITTER, JITTER, JITTER)
        self.erase = v2.RandomErasing(p=ERASE_PROBABILITY, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random")

    def __call__(self, pixels: Tensor, indices: Tensor, epoch: int, normalize: Normalize) -> Tensor:
        """Augment and normalize the images, as described in Augment."""
        from torchvision.transforms import v2

        pixels = self.move(pixels, indices, epoch)
        keys = mixed_each(mixed(self.seed, epoch, STRONG_STREAM), indices.numpy()).tolist()
        mean_color = [round(255 * mean) for mean in normalize.mean]
        rand_augment = v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR, fill=mean_color)
        # torchvision draws from torch's default generator. Its state is restored, so that augmentation does not change
        # other random numbers of the run. torch.random.fork_rng with torch.manual_seed would seed the GPUs too.
        generator = torch.default_generator
        before = generator.get_state()
        try:
            images = []
            for image, key in zip(pixels, keys, strict=True):
                generator.manual_seed(key)
                images.append(self.erase(normalize(rand_augment(self.change(image))[None])[0]))
        finally:
            generator.set_state(before)
        return torch.stack(images) if images else normalize(pixels)

    def move(self, pixels: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Shift and mirror the images, all at once."""
        return BasicAugment(self.seed, flip=self.flip).shift_and_flip(pixels, indices, epoch)


class TimmAugment:
    """The transform that timm's `create_transform` makes of `TIMM_RECIPE`: crop, mirroring, RandAugment and erasing.

    timm computes with PIL images, so grayscale images are converted to colors and back.
    """

    def __init__(self, seed: int, *, flip: bool) -> None:
        # Imported only for --augment timm, which is not installed with the trainer.
        from timm.data.transforms_factory import create_transform  # type: ignore[import-not-found, unused-ignore]

        self.seed, self.flip, self.create_transform = seed, flip, create_transform

    def __call__(self, pixels: Tensor, indices: Tensor, epoch: int, normalize: Normalize) -> Tensor:
        """Augment and normalize the images, as described in Augment."""
        from PIL import Image

        channels, size = pixels.shape[1], (pixels.shape[2], pixels.shape[3])
        colors = 3 // channels  # how often a channel is repeated
        transform = self.create_transform(
            size,
            hflip=0.5 if self.flip else 0.0,
            mean=normalize.mean * (3 // len(normalize.mean)),
            std=normalize.std * (3 // len(normalize.std)),
            **TIMM_RECIPE,
        )
        keys = mixed_each(mixed(self.seed, epoch, TIMM_STREAM), indices.numpy()).tolist()
        images = []
        with keep_generators():
            for image, key in zip(pixels, keys, strict=True):
                seed_generators(key)
                picture = Image.fromarray(image.repeat(colors, 1, 1).permute(1, 2, 0).numpy())
                images.append(transform(picture)[:channels])
        return torch.stack(images) if images else normalize(pixels)


def seed_generators(key: int) -> None:
    """Seed the generators of Python, numpy and torch, of which timm's operations draw."""
    random.seed(key)
    np.random.seed(key % 2**32)
    # torch.manual_seed would seed the GPUs too.
    torch.default_generator.manual_seed(key)


@contextmanager
def keep_generators() -> Iterator[None]:
    """Restore the generators of Python, numpy and torch at the end, so that other random numbers do not change."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)
