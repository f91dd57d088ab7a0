"""The data sets, by the name that --data takes, and how a global batch is split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.data.augment import AUGMENTATIONS
from train.data.dataset import Data, DataOptions
from train.data.digits import load_digits
from train.data.download import fetch
from train.data.own_shares import OwnSharesSampler
from train.data.sampler import DistributedBatchSampler, smallest_share
from train.data.synthetic import MOST_SAMPLES, load_synthetic
from train.data.vision import SOURCES
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "MOST_SAMPLES",
    "Data",
    "DataOptions",
    "DistributedBatchSampler",
    "OwnSharesSampler",
    "download",
    "load_data",
    "smallest_share",
]

# Each takes the folder that --data-dir names, or None for its own default, and what else is asked for.
DATASETS: dict[str, Callable[[Path | None, DataOptions], Data]] = {
    "digits": load_digits,
    "synthetic": load_synthetic,
    **{source.name: source for source in SOURCES},
}
DEFAULT = DataOptions()
# Those that only a data set made on demand can follow.
SIZES = ("image_size", "channels", "classes", "train_samples")


def load_data(name: str, folder: Path | None, limit_train: int | None, options: DataOptions = DEFAULT) -> Data:
    """Load the data set `name` and keep its first `limit_train` training samples.

    Raises UserError for an unknown name, for options that the data set cannot follow, and for files that are missing
    or unfit.
    """
    if name not in DATASETS:
        raise UserError(f"--data {name}: unknown; there are {', '.join(DATASETS)}")
    for size in SIZES:
        if name != "synthetic" and getattr(options, size) is not None:
            option = f"--{size.replace('_', '-')} {getattr(options, size)}"
            raise UserError(f"{option}: {name} is as it is; only --data synthetic can be of any size")
    data = DATASETS[name](folder, options)
    if limit_train is None:
        return data
    if limit_train > len(data.train):
        raise UserError(f"--limit-train {limit_train}: {name} has {len(data.train)} training samples")
    return Data(data.train.first(limit_train), data.test, data.channels, data.classes, data.image_size)


def download(name: str, folder: Path | None) -> None:
    """Download the data set `name` into `folder`, unless it is there. Raises UserError."""
    for source in SOURCES:
        if source.name == name:
            return fetch(source, folder)
    raise UserError(f"--download: there is nothing to download for --data {name}; leave it out")
