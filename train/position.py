"""The plan of a run, and its progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.metrics import Meter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Plan:
    """The length of a run: its name, epochs, optimizer steps in total and per epoch."""

    run: str
    epochs: int
    steps: int
    steps_per_epoch: int


class Position:
    """The progress of a run.

    step: optimizer steps done. epoch: the current epoch, counted from 1. in_epoch: steps done in this epoch. meter:
    this rank's sums in this epoch.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = 0
        self.epoch = 1
        self.in_epoch = 0
        self.meter = Meter(device)

    def next_epoch(self) -> None:
        """Start the next epoch."""
        self.epoch += 1
        self.in_epoch = 0
        self.meter = Meter(self.meter.sums.device)
