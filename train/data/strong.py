"""The augmentation of today's long recipes: colour jitter, RandAugment and random erasing behind the basic one.

Imports torchvision and PIL: nothing imports this module at its top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2  # type: ignore[import-untyped]

from train.data.augment import Basic
from train.data.rand_augment import rand_augment
from train.seeds import mixed, mixed_each

if TYPE_CHECKING:
    from train.data.dataset import Normalize

JITTER = 0.4  # brightness, contrast and saturation are multiplied by 0.6 to 1.4
ERASED = 0.25  # probability
STREAM = 1  # keeps these draws apart from those of Basic


class Strong:
    """Shift and mirror as Basic does; then jitter of colours, RandAugment, and behind Normalize random erasing.

    The erased rectangle, of 2 % to a third of the image, is filled with normal noise, each pixel its own: the mode
    that timm calls "pixel" (https://arxiv.org/abs/1708.04896). Grey images have no saturation, so it is left out.
    """

    def __init__(self, seed: int, *, flip: bool) -> None:
        self.seed, self.basic = seed, Basic(seed, flip=flip)
        self.erase = v2.RandomErasing(p=ERASED, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), value="random")

    def __call__(self, pixels: Tensor, indices: Tensor, epoch: int, normalize: Normalize) -> Tensor:
        """See Augment."""
        pixels = self.basic.moved(pixels, indices, epoch)
        keys = mixed_each(mixed(self.seed, epoch, STREAM), indices.numpy()).tolist()
        fill = tuple(round(255 * mean) for mean in normalize.mean)
        # torchvision draws from torch's default generator. It is put back, so that the rest of the run draws what it
        # would draw without; not torch.random.fork_rng and torch.manual_seed, which would seed the GPUs too.
        generator = torch.default_generator
        before = generator.get_state()
        try:
            changed = []
            for image, key in zip(pixels, keys, strict=True):
                generator.manual_seed(key)
                changed.append(self.erase(normalize(self.coloured(image, fill)[None])[0]))
        finally:
            generator.set_state(before)
        return torch.stack(changed) if changed else normalize(pixels)

    def coloured(self, image: Tensor, fill: tuple[int, ...]) -> Tensor:
        """Jitter the colours and apply RandAugment: uint8 [channels, H, W] of the same. fill: the mean colour."""
        grey = len(image) == 1
        picture = Image.fromarray(image[0].numpy() if grey else image.permute(1, 2, 0).contiguous().numpy())
        jitter = v2.ColorJitter(brightness=JITTER, contrast=JITTER, saturation=None if grey else JITTER)
        picture = rand_augment(jitter(picture), fill)
        return v2.functional.pil_to_tensor(picture)  # type: ignore[no-any-return]
