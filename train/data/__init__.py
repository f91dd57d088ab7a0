"""The data sets, by the name that --data takes, and how a global batch is split over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.data import Subset

from train.data.dataset import Data
from train.data.digits import load_digits
from train.data.own_shares import OwnSharesSampler
from train.data.sampler import DistributedBatchSampler, smallest_share
from train.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["DATASETS", "Data", "DistributedBatchSampler", "OwnSharesSampler", "load_data", "smallest_share"]

# Each takes the folder that --data-dir names, or None for its own default.
DATASETS: dict[str, Callable[[Path | None], Data]] = {
    "digits": load_digits,
}


def load_data(name: str, folder: Path | None, limit_train: int | None) -> Data:
    """Load the data set `name` and keep its first `limit_train` training samples.

    Raises UserError for an unknown name and for files that are missing or unfit.
    """
    if name not in DATASETS:
        raise UserError(f"--data {name}: unknown; there are {', '.join(DATASETS)}")
    data = DATASETS[name](folder)
    if limit_train is None:
        return data
    if limit_train > len(data.train):
        raise UserError(f"--limit-train {limit_train}: {name} has {len(data.train)} training samples")
    return Data(Subset(data.train, range(limit_train)), data.test, data.channels, data.classes)
