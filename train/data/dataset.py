"""What every data set offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.data import Subset, TensorDataset

if TYPE_CHECKING:
    from torch import Tensor

# Each sample is (image float32 [channels, H, W], label int64 []).
Samples = TensorDataset | Subset[tuple["Tensor", ...]]


@dataclass(frozen=True)
class Data:
    """Training and test samples that share no image."""

    train: Samples
    test: Samples
    channels: int
    classes: int
