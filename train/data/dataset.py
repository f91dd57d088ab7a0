"""Records and classes that all data sets share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from train.data.folders import check_folder
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from train.data.mixup import Mixup


@dataclass(frozen=True)
class DataOptions:
    """Options of a data set; None selects the default.

    image_size (pixels along each edge), channels, classes, train_samples: for `synthetic` only. augment: none, basic,
    strong or timm. mixup: parameter of the weights, or 0. label_smoothing: share of the probability, or 0. seed: seed
    of the augmentation.
    """

    image_size: int | None = None
    channels: int | None = None
    classes: int | None = None
    train_samples: int | None = None
    augment: str = "none"
    mixup: float = 0.0
    label_smoothing: float = 0.0
    seed: int = 0

    @classmethod
    def from_settings(cls, settings: Any) -> DataOptions:
        """Copy the fields from a record with the same names, for example the settings of a run."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Normalize:
    """Convert bytes to floats with mean 0 and standard deviation 1 per channel over the training set.

    mean, std: one number per channel, or a single number for all channels, divided by 255.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize uint8 [N, channels, H, W] to float32 of the same shape."""
        mean, std = (255 * torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std))
        return pixels.to(torch.float32).sub_(mean).div_(std)


# Augments and normalizes training images. Arguments: uint8 [N, channels, H, W], int64 [N] indices into the whole
# training set, the epoch, and the normalization. Returns float32 [N, channels, H, W]. The result for an image depends
# only on the image, its index and the epoch.
Augment = Callable[[Tensor, Tensor, int, Normalize], Tensor]


class Images(Dataset[tuple[Tensor, ...]]):
    """Images with labels, indexed one by one or vectorized over a batch.

    images: [N, channels, H, W], uint8 with `normalize`, otherwise float32 and already normalized. labels: int64 [N].
    For a text, both are int64 [N, sequence]: bytes, and the next bytes.
    `data[3]` is (float32 [channels, H, W], int64 []), `data[[3, 5]]` and `data[3:5]` are (float32 [2, channels, H, W],
    int64 [2]).

    With `mixup`, labels are probabilities, float32 [N, classes]. With `augment`, call `set_epoch` before each epoch,
    and before the DataLoader starts its workers.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, normalize: Normalize | None = None, augment: Augment | None = None
    ) -> None:
        self.images, self.labels, self.normalize, self.augment = images, labels, normalize, augment
        self.samples, self.epoch = len(labels), 0
        self.mixup: Mixup | None = None

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        """Select the augmentation of the next epoch, equal on all ranks."""
        self.epoch = epoch

    def first(self, samples: int) -> Images:
        """Return a data set of the first samples, which shares memory with this data set."""
        subset = copy.copy(self)
        subset.samples = samples
        return subset

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stored images and labels of the rows, int64 [N]."""
        # self.images[rows] takes twenty times as long for bytes.
        return self.images.index_select(0, rows), self.labels.index_select(0, rows)

    def __getitem__(self, index: int | slice | Sequence[int]) -> tuple[Tensor, ...]:
        if isinstance(index, slice):
            rows = torch.arange(*index.indices(self.samples))
        else:
            rows = torch.tensor([index] if isinstance(index, int) else index, dtype=torch.int64)
            if rows.numel() and not -self.samples <= rows.min() <= rows.max() < self.samples:
                raise IndexError(f"index out of range: the data set has {self.samples} samples")
            rows = rows % self.samples
        images, labels = self.load(rows)
        if self.mixup is not None and not self.mixup.alpha:
            labels = self.mixup.smooth(labels)
        elif self.mixup is not None:
            partners, weights = self.mixup.draw(rows, self.epoch, self.samples)
            pairs = zip((images, labels), self.load(partners), strict=True)
            images, labels = (self.mixup.mix(inputs, targets, weights) for inputs, targets in pairs)
        if isinstance(index, int):
            return images[0], labels[0]
        return images, labels

    def load(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images of the rows, augmented and normalized, and their labels."""
        images, labels = self.take(rows)
        if self.normalize is not None and self.augment is not None:
            images = self.augment(images, rows, self.epoch, self.normalize)
        elif self.normalize is not None:
            images = self.normalize(images)
        return images, labels


class Collated(Images):
    """A data set of a user's task, whose samples are collated into batches like in torch's DataLoader."""

    def __init__(self, samples: Any) -> None:
        self.each, self.samples, self.epoch = samples, len(samples), 0

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the data set, if it takes it."""
        if hasattr(self.each, "set_epoch"):
            self.each.set_epoch(epoch)

    def __getitem__(self, index: int | slice | Sequence[int]) -> tuple[Tensor, ...]:
        if isinstance(index, int):
            sample: tuple[Tensor, ...] = self.each[index]
            return sample
        rows: Sequence[int] = range(self.samples)[index] if isinstance(index, slice) else index
        return tuple(default_collate([self.each[row] for row in rows]))


def locate_file(folder: Path | None, default_folder: Path, name: str) -> tuple[Path, str]:
    """Return the path of a data file, and how to fix its absence. folder: None for the file in this clone.

    Raises UserError for a folder that cannot contain the file.
    """
    if folder is None:
        return default_folder / name, "the clone is incomplete"
    check_folder(folder, name, "omit --data-dir for the file of this clone")
    return folder / name, f"set --data-dir to the folder of {name}"


@dataclass(frozen=True)
class Data:
    """Disjoint training and test samples: Images, or other data sets of a user's task until they are loaded.

    channels: 0 for text. classes: of images, or number of different bytes. image_size: pixels along each edge, as all
    images are square, or length of a text's sequences.
    """

    train: Any
    test: Any
    channels: int = 0
    classes: int = 0
    image_size: int = 0


def limit(data: Data, samples: int | None, name: str) -> Data:
    """Keep the first training samples (None: all). Raises UserError if there are fewer."""
    if samples is None:
        return data
    if samples > len(data.train):
        raise UserError(f"--limit-train {samples}: {name} has only {len(data.train)} training samples")
    return replace(data, train=data.train.first(samples))
