"""Random changes of the training images, each a pure function of the run's seed, the epoch and the image's index.

So an image comes out the same on whatever rank it falls, with any number of ranks and workers, and after a resume in
the middle of an epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from train.errors import UserError
from train.seeds import mixed, mixed_each, scrambled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from train.data.dataset import Augment, DataOptions, Normalize

AUGMENTATIONS = ("none", "basic", "strong")


def augmentation(options: DataOptions, channels: int, *, flip: bool) -> Augment | None:
    """Build the augmentation that the options name; None for none.

    flip: whether an image means the same when mirrored, which a digit does not. Raises UserError for an unknown name,
    images that it cannot work on, and where torchvision is missing.
    """
    if options.augment == "none":
        return None
    if options.augment not in AUGMENTATIONS:
        raise UserError(f"--augment {options.augment}: unknown; there are {', '.join(AUGMENTATIONS)}")
    if options.augment == "basic":
        return Basic(options.seed, flip=flip)
    if channels not in (1, 3):
        raise UserError(f"--augment strong: needs grey or RGB images, and these have {channels} channels; use basic")
    try:
        from train.data.strong import Strong  # imports torchvision, which takes seconds and few runs need
    except ImportError as error:
        raise UserError("--augment strong needs torchvision: pip install -e '.[train]'") from error
    return Strong(options.seed, flip=flip)


class Basic:
    """Shift the image at random by up to an eighth of its size, and mirror it or not.

    As in section 4.2 of https://arxiv.org/abs/1512.03385: 4 black pixels around an image of 32x32, a random crop of
    its size, and a horizontal flip. A whole batch at once.
    """

    def __init__(self, seed: int, *, flip: bool) -> None:
        self.seed, self.flip = seed, flip

    def __call__(self, pixels: Tensor, indices: Tensor, epoch: int, normalize: Normalize) -> Tensor:
        """See Augment."""
        return normalize(self.moved(pixels, indices, epoch))

    def moved(self, pixels: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Shift and mirror: uint8 [N, channels, H, W] of the same."""
        count, _, height, width = pixels.shape
        pad = max(1, height // 8)
        keys = mixed_each(mixed(self.seed, epoch), indices.numpy())
        # Remainders of 64 random bits: they are uneven by less than one in 2**50.
        sizes = (2 * pad + 1, 2 * pad + 1, 2)
        top, left, mirror = (torch.from_numpy(drawn(keys, number, size)) for number, size in enumerate(sizes))
        padded = F.pad(pixels, (pad, pad, pad, pad))
        if self.flip:
            padded = torch.where(mirror.view(-1, 1, 1, 1) == 1, padded.flip(3), padded)
        # A view of all windows, [N, channels, 2 * pad + 1, 2 * pad + 1, H, W], of which one for each image is copied.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(count), :, top, left]


def drawn(keys: NDArray[np.uint64], which: int, size: int) -> NDArray[np.int64]:
    """Draw a number from 0 to below `size` for each image: the draw number `which` from its key. int64 [N] of [N]."""
    return (scrambled(keys + np.uint64(which)) % np.uint64(size)).astype(np.int64)
