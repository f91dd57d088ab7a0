"""What every data set offers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class DataOptions:
    """What can be asked of a data set; None for its own.

    image_size: pixels along each edge. channels, classes, train_samples: with image_size for `synthetic` only, where
    they can be chosen. augment: none, basic or strong. seed: of the augmentation.
    """

    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    train_samples: int | None = None
    augment: str = "none"
    seed: int = 0

    @classmethod
    def of(cls, settings: Any) -> DataOptions:
        """Take them from a record that has fields of these names, such as the settings of a run."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Normalize:
    """Makes of bytes what a network likes: each channel with mean 0 and standard deviation 1 over the training set.

    mean, std: of each channel, or one of each for all channels, in parts of 255.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels: uint8 [N, channels, H, W]. Returns float32 of the same shape."""
        mean, std = (255 * torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std))
        return pixels.to(torch.float32).sub_(mean).div_(std)


class Augment(Protocol):
    """Changes images at random for training."""

    def __call__(self, pixels: Tensor, indices: Tensor, epoch: int, normalize: Normalize) -> Tensor:
        """Give each image its change of this epoch, and normalize it.

        pixels: uint8 [N, channels, H, W]. indices: int64 [N], where each stands in the whole training set. Returns
        float32 [N, channels, H, W]. What an image becomes depends on nothing but itself, its index and the epoch.
        """
        ...  # pragma: no cover


class Images(Dataset[tuple[Tensor, ...]]):
    """Images with their labels, taken one by one, or many at once without a loop over them.

    images: [N, channels, H, W], uint8 with `normalize`, else float32 and as they shall be. labels: int64 [N].
    `data[3]` is (float32 [channels, H, W], int64 []), `data[[3, 5]]` and `data[3:5]` are (float32 [2, channels, H, W],
    int64 [2]).

    Call `set_epoch` before each epoch, and before the workers of its DataLoader are started: with `augment`, it
    decides with the index how an image is changed.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, normalize: Normalize | None = None, augment: Augment | None = None
    ) -> None:
        self.images, self.labels, self.normalize, self.augment = images, labels, normalize, augment
        self.samples, self.epoch = len(labels), 0

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        """Choose the changes of the next pass, the same on all ranks."""
        self.epoch = epoch

    def first(self, samples: int) -> Images:
        """Keep the first of them only."""
        fewer = copy.copy(self)
        fewer.samples = samples
        return fewer

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Give the images and labels at these places, int64 [N], as they are stored."""
        # Not self.images[rows], which takes twenty times as long for bytes.
        return self.images.index_select(0, rows), self.labels.index_select(0, rows)

    def __getitem__(self, index: int | slice | Sequence[int]) -> tuple[Tensor, ...]:
        if isinstance(index, slice):
            rows = torch.arange(*index.indices(self.samples))
        else:
            rows = torch.tensor([index] if isinstance(index, int) else index, dtype=torch.int64)
            if rows.numel() and not -self.samples <= rows.min() <= rows.max() < self.samples:
                raise IndexError(f"index out of range: there are {self.samples} samples")
            rows = rows % self.samples
        images, labels = self.take(rows)
        if self.normalize is not None and self.augment is not None:
            images = self.augment(images, rows, self.epoch, self.normalize)
        elif self.normalize is not None:
            images = self.normalize(images)
        return (images[0], labels[0]) if isinstance(index, int) else (images, labels)


@dataclass(frozen=True)
class Data:
    """Training and test samples that share no image.

    image_size: pixels along each edge; all images are square.
    """

    train: Images
    test: Images
    channels: int
    classes: int
    image_size: int
