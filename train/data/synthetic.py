"""Images and labels made up in memory, of any size and number: for timing without files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from train.data.augment import augmentation
from train.data.dataset import Augment, Data, DataOptions, Images, Normalize
from train.errors import UserError
from train.seeds import mixed_each

if TYPE_CHECKING:
    from pathlib import Path

IMAGE_SIZE, CHANNELS, CLASSES, TRAIN_SAMPLES = 32, 3, 10, 50_000  # as many and as large as CIFAR-10's
SEED = 0  # of the data, not of the run: all runs train on the same images
POOL = 2**24  # bytes of noise
PATCHES = 4  # along each edge
MOST_PIXELS = 2**24  # of one image, all channels: larger than any in use, and what a pool can hold
MOST_CLASSES = 65_536
MOST_SAMPLES = 2**24  # ten times ImageNet's; their order alone is a list of that length
# Half of an even distribution over 0 to 255 plus half of another: mean 1/2, variance 2 (1/2)^2 / 12.
MEAN, STD = 0.5, 24**-0.5


class Synthetic(Images):
    """Noise over a pattern of 4x4 patches for each class, so there is something to learn.

    Nothing is stored for each image: its noise is a piece of one pool of random bytes, from a place that its index
    decides. So any number of them costs the same memory, and an image costs little more time than one that is stored.

    shape: channels, H and W of an image. first: index of its first image in the stream of all images.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, samples: int, first: int, augment: Augment | None = None
    ) -> None:
        # NumPy guarantees the stream of RandomState for ever (NEP 19): the same bits on every machine.
        random = np.random.RandomState(SEED)
        self.pixels = int(np.prod(shape))
        pool = np.frombuffer(bytearray(random.bytes(POOL + self.pixels)), np.uint8)
        patterns = random.randint(0, 128, (classes, shape[0], PATCHES, PATCHES), np.uint8)
        self.pool = torch.from_numpy(pool) // 2
        self.shape, self.classes, self.offset = shape, classes, first
        self.patterns, self.enlarged = torch.from_numpy(patterns), classes * self.pixels <= POOL
        if self.enlarged:
            self.patterns = self.enlarge(self.patterns)
        super().__init__(torch.empty(0, *shape), torch.empty(0), Normalize((MEAN,), (STD,)), augment)
        self.samples = samples

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Make the images and labels at these places; the classes take turns."""
        labels = rows % self.classes
        starts = mixed_each(SEED, (rows + self.offset).numpy()) % np.uint64(POOL)
        # Every piece of the pool is a row of this view; a gather copies the rows that are asked for.
        pieces = self.pool.as_strided((POOL, self.pixels), (1, 1))
        noise = pieces.index_select(0, torch.from_numpy(starts.astype(np.int64))).view(-1, *self.shape)
        patterns = self.patterns.index_select(0, labels)
        return noise.add_(patterns if self.enlarged else self.enlarge(patterns)), labels

    def enlarge(self, patterns: Tensor) -> Tensor:
        """Make patches as large as an image needs: [N, channels, 4, 4] to [N, channels, H, W]."""
        # By index: interpolation of bytes would be done in floating point.
        y, x = (torch.arange(edge) * PATCHES // edge for edge in self.shape[1:])
        return patterns[:, :, y[:, None], x]


def load_synthetic(folder: Path | None, options: DataOptions) -> Data:
    """Make it. Raises UserError for sizes beyond all use, and for a folder, which it does not need."""
    if folder is not None:
        raise UserError(f"--data-dir {folder}: --data synthetic is made in memory; leave it out")
    size, channels = options.image_size or IMAGE_SIZE, options.channels or CHANNELS
    classes, samples = options.classes or CLASSES, options.train_samples or TRAIN_SAMPLES
    if channels * size**2 > MOST_PIXELS:
        raise UserError(f"--image-size {size} --channels {channels}: an image of more than {MOST_PIXELS} bytes")
    if classes > MOST_CLASSES or classes * channels > MOST_PIXELS:
        raise UserError(f"--classes {classes}: needs {MOST_CLASSES} or fewer, and fewer with many channels")
    if samples > MOST_SAMPLES:
        raise UserError(f"--train-samples {samples}: needs {MOST_SAMPLES} or fewer")
    shape = (channels, size, size)
    train = Synthetic(shape, classes, samples, 0, augmentation(options, channels, flip=True))
    test = Synthetic(shape, classes, max(1, samples // 10), samples)
    return Data(train, test, channels, classes, size)
