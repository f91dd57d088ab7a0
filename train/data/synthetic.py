"""Synthetic images and labels of any size and number, for timing without files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from train.data.augment import build_augment
from train.data.dataset import Augment, Data, DataOptions, Images, Normalize
from train.errors import refuse
from train.seeds import mixed_each

if TYPE_CHECKING:
    from pathlib import Path

IMAGE_SIZE, CHANNELS, CLASSES, TRAIN_SAMPLES = 32, 3, 10, 50_000  # the sizes of CIFAR-10
# Independent of --seed: all runs train on the same images.
SEED = 0
POOL = 2**24  # bytes of noise
PATCHES = 4  # along each edge
# Pixels of one image over all channels; the size of the pool.
MAX_PIXELS = 2**24
MAX_CLASSES = 65_536
# Ten times ImageNet; the order of an epoch is a list of this length.
MAX_SAMPLES = 2**24
# The average of two uniform distributions over 0 to 255: mean 1/2, variance 2 (1/2)^2 / 12.
MEAN, STD = 0.5, 24**-0.5


class Synthetic(Images):
    """Images that add noise to a pattern of 4x4 patches per class, so that a model can learn the classes.

    No image is stored: its noise is a slice of one pool of random bytes, at an offset determined by its index. Any
    number of images takes the same memory, and generating an image takes little longer than reading a stored image.

    shape: channels, H and W of an image. first: index of the first image in the stream of all images.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int, samples: int, first: int, augment: Augment | None = None
    ) -> None:
        # NumPy guarantees that the stream of RandomState never changes (NEP 19): equal bits on every machine.
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
        """Generate the images and labels of the rows; consecutive images have consecutive classes."""
        labels = rows % self.classes
        starts = mixed_each(SEED, (rows + self.offset).numpy()) % np.uint64(POOL)
        # Every slice of the pool is a row of this view; index_select copies only the requested rows.
        slices = self.pool.as_strided((POOL, self.pixels), (1, 1))
        noise = slices.index_select(0, torch.from_numpy(starts.astype(np.int64))).view(-1, *self.shape)
        patterns = self.patterns.index_select(0, labels)
        return noise.add_(patterns if self.enlarged else self.enlarge(patterns)), labels

    def enlarge(self, patterns: Tensor) -> Tensor:
        """Scale the patches to the image size: [N, channels, 4, 4] to [N, channels, H, W]."""
        # By index, because torch interpolates bytes in floating point.
        y, x = (torch.arange(edge) * PATCHES // edge for edge in self.shape[1:])
        return patterns[:, :, y[:, None], x]


def load_synthetic(folder: Path | None, options: DataOptions) -> Data:
    """Build the synthetic data. Raises UserError for sizes above the limits, and for a folder."""
    size, channels = options.image_size or IMAGE_SIZE, options.channels or CHANNELS
    classes, samples = options.classes or CLASSES, options.train_samples or TRAIN_SAMPLES
    most_classes = min(MAX_CLASSES, MAX_PIXELS // channels)
    refuse(
        (folder, f"--data-dir {folder}: not supported by --data synthetic, which needs no files; omit it"),
        (
            channels * size**2 > MAX_PIXELS,
            f"--image-size {size} --channels {channels}: an image must have at most {MAX_PIXELS} bytes",
        ),
        (classes > most_classes, f"--classes {classes}: must be at most {most_classes} with {channels} channels"),
        (samples > MAX_SAMPLES, f"--train-samples {samples}: must be at most {MAX_SAMPLES}"),
    )
    shape = (channels, size, size)
    train = Synthetic(shape, classes, samples, 0, build_augment(options, channels, flip=True))
    test = Synthetic(shape, classes, max(1, samples // 10), samples)
    return Data(train, test, channels, classes, size)
